"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.norm.add_attn_res_rms_norm import portable as fast
from tercel.ops.norm.add_attn_res_rms_norm import reference as naive
from tercel.ops.norm.add_attn_res_rms_norm.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.add_attn_res_rms_norm),
    portable(fast.add_attn_res_rms_norm),
    kernel("gluon", naive.add_attn_res_rms_norm),
    kernel("triton", naive.add_attn_res_rms_norm),
)
def add_attn_res_rms_norm(
    x: torch.Tensor,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    weight: torch.Tensor,
    *,
    res_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new prefix sum, the mixture that the next sublayer reads, and its RMSNorm.

    Args:
        x: [T, N] act, a sublayer's reduced output.
        prefix: [T, N] act: the sum of sublayer outputs since the last snapshot; None right after
            a snapshot.
        bank: [S, T, N] act snapshots, oldest first; may be a slice of a larger bank.
        res_norm: [N] act.
        res_proj: [N] act.
        weight: [N] act, of the norm.
        res_eps: added to the mean squares of the selection.
        eps: added to the mean square of the norm.
    Returns:
        (normed [T, N], updated [T, N], mixture [T, N]) act, newly allocated, except that updated
        is x itself where prefix is None.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: Kimi K3 modeling_kimi_linear.py, the decoder layer with attention residuals.
    """
