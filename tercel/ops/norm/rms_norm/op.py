"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.norm.rms_norm import portable as fast
from tercel.ops.norm.rms_norm import reference as naive
from tercel.ops.norm.rms_norm.contract import CONTRACT


@operation(
    CONTRACT, reference(naive.rms_norm), portable(fast.rms_norm), kernel("triton", naive.rms_norm)
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Rows of x, each divided by its root mean square and scaled by the weight.

    Args:
        x: [T, N] activations; rows contiguous.
        weight: [N] in the dtype of x.
        eps: added to the mean square, inside the root.
    Returns:
        [T, N] in the dtype of x, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: Kimi K3 modeling_kimi_linear.py, KimiRMSNorm.
    """
