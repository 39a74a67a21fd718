"""The public function."""

import torch

from tercel.contract import kernel, operation, ordered, portable, reference
from tercel.ops.gemm.gemv import ordered as tiled
from tercel.ops.gemm.gemv import portable as fast
from tercel.ops.gemm.gemv import reference as naive
from tercel.ops.gemm.gemv.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.gemv),
    portable(fast.gemv),
    ordered(tiled.gemv),
    kernel("gluon", naive.gemv),
    kernel("triton", naive.gemv),
)
def gemv(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None) -> torch.Tensor:
    """x times the transposed weight, the last columns through a sigmoid, for at most 64 rows.

    Args:
        x: [T, K] act, T up to 64; rows contiguous.
        weight: [M, K] act, nn.Linear layout. Kernels read it before the wait for the previous
            launch, which must not write it.
        sigmoid_from: columns from here on pass through a sigmoid, after the product is rounded.
    Returns:
        [T, M] in the dtype of x, newly allocated.
    Raises:
        ContractError: more rows, a shape or dtype outside the contract, columns that do not exist.
    Source: as gemm/linear.
    """
