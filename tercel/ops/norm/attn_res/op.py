"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.norm.attn_res import portable as fast
from tercel.ops.norm.attn_res import reference as naive
from tercel.ops.norm.attn_res.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.attn_res),
    portable(fast.attn_res),
    kernel("gluon", naive.attn_res),
    kernel("triton", naive.attn_res),
)
def attn_res(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    *,
    eps: float,
) -> torch.Tensor:
    """The mixture of snapshots and prefix sum that a sublayer reads.

    Args:
        bank: [S, T, N] act snapshots, oldest first; may be a slice of a larger bank. S may be 0.
        prefix: [T, N] act: the sum of sublayer outputs since the last snapshot.
        res_norm: [N] act.
        res_proj: [N] act.
        eps: added to the mean square, inside the root.
    Returns:
        [T, N] act, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: Kimi K3 modeling_kimi_linear.py, the attention-residual selection.
    """
