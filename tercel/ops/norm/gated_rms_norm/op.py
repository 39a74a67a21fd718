"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.norm.gated_rms_norm import portable as fast
from tercel.ops.norm.gated_rms_norm import reference as naive
from tercel.ops.norm.gated_rms_norm.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.gated_rms_norm),
    portable(fast.gated_rms_norm),
    kernel("triton", naive.gated_rms_norm),
)
def gated_rms_norm(
    o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """The heads' outputs, normalised per head and gated per channel.

    Args:
        o: [T, H, V] act, the attention's output.
        gate: [T, H * V] act before the sigmoid; rows contiguous, so a slice of a fused projection.
        weight: [V] fp32, shared by the heads.
        eps: added to the mean square, inside the root.
    Returns:
        [T, H * V] in the dtype of o, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.o_norm; FLA FusedRMSNormGated.
    """
