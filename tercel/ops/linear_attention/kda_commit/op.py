"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops._lib.kda import kernel_limits
from tercel.ops.linear_attention.kda_commit import portable as chunked
from tercel.ops.linear_attention.kda_commit import reference as naive
from tercel.ops.linear_attention.kda_commit.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.kda_commit),
    portable(chunked.kda_commit),
    kernel("triton", naive.kda_commit, admits=kernel_limits),
)
def kda_commit(
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    draft_k: torch.Tensor,
    draft_v: torch.Tensor,
    draft_g: torch.Tensor,
    draft_beta: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
) -> None:
    """Makes slots plain decode states: their accepted drafts become part of state and window.

    Args:
        conv: [SLOTS, S, C] raw rows, S = W - 1 + D; rows 0 .. W - 2 of each slot are replaced.
        recurrent: [SLOTS, H, V, K] fp32; each slot is replaced.
        draft_k: [SLOTS, D, H, K] normalised keys, as kda_verify left them.
        draft_v: [SLOTS, D, H, V].
        draft_g: [SLOTS, D, H, K] fp32.
        draft_beta: [SLOTS, D, H] fp32.
        slots: [R] int64. Kernels read them and `pending` before the wait for the previous launch,
            which must not write them.
        pending: [R] int64 accepted drafts, 0 .. D.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        a second commit of the same drafts: `pending` is zero afterwards, which the caller keeps.
    Source: derived from kda_verify.
    """
