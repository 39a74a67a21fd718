"""The public function."""

import torch

from tercel.contract import operation, ordered, portable, reference
from tercel.ops.gemm.linear import ordered as tiled
from tercel.ops.gemm.linear import portable as fast
from tercel.ops.gemm.linear import reference as naive
from tercel.ops.gemm.linear.contract import CONTRACT


@operation(CONTRACT, reference(naive.linear), portable(fast.linear), ordered(tiled.linear))
def linear(
    x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None
) -> torch.Tensor:
    """x times the transposed weight, the last columns through a sigmoid.

    Args:
        x: [T, K] act; rows contiguous.
        weight: [M, K] act, nn.Linear layout.
        sigmoid_from: columns from here on pass through a sigmoid, after the product is rounded.
    Returns:
        [T, M] in the dtype of x, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract, or columns that do not exist.
    Source: Kimi K3 modeling_kimi_linear.py, the bias-free projections; MLA's g_proj.
    """
