"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.norm.add_rms_norm import portable as fast
from tercel.ops.norm.add_rms_norm import reference as naive
from tercel.ops.norm.add_rms_norm.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.add_rms_norm),
    portable(fast.add_rms_norm),
    kernel("triton", naive.add_rms_norm),
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual and its RMSNorm.

    Args:
        x: [T, N] act, a sublayer's reduced output.
        residual: [T, N] act.
        weight: [N] act.
        eps: added to the mean square, inside the root.
    Returns:
        (normed [T, N], updated [T, N]) act, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: Kimi-Linear modeling_kimi.py, the decoder layer and KimiRMSNorm.
    """
