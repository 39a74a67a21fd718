"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.ops.gemm.linear_f32 import reference as naive
from tercel.ops.gemm.linear_f32.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.linear_f32),
    kernel("gluon", naive.linear_f32),
    kernel("triton", naive.linear_f32),
)
def linear_f32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times the transposed weight, not rounded to the dtype of x.

    Args:
        x: [T, K] act; rows contiguous.
        weight: [M, K] act, nn.Linear layout.
    Returns:
        [T, M] fp32, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Source: Kimi K3 modeling_kimi_linear.py, the MoE gate.
    """
