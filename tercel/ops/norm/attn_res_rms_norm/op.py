"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.norm.attn_res_rms_norm import portable as fast
from tercel.ops.norm.attn_res_rms_norm import reference as naive
from tercel.ops.norm.attn_res_rms_norm.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.attn_res_rms_norm),
    portable(fast.attn_res_rms_norm),
    kernel("gluon", naive.attn_res_rms_norm),
    kernel("triton", naive.attn_res_rms_norm),
)
def attn_res_rms_norm(
    bank: torch.Tensor,
    prefix: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    weight: torch.Tensor,
    *,
    res_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mixture that a sublayer reads, and its RMSNorm.

    Args:
        bank: [S, T, N] act snapshots, oldest first; may be a slice of a larger bank. S may be 0.
        prefix: [T, N] act: the sum of sublayer outputs since the last snapshot.
        res_norm: [N] act.
        res_proj: [N] act.
        weight: [N] act, of the norm.
        res_eps: added to the mean squares of the selection.
        eps: added to the mean square of the norm.
    Returns:
        (normed [T, N], mixture [T, N]) act, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: Kimi K3 modeling_kimi_linear.py, the attention-residual selection and KimiRMSNorm.
    """
