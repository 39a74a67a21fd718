"""The public function."""

import torch

from tercel.contract import kernel, operation, ordered, portable, reference
from tercel.ops.gemm.gemv_glu import ordered as tiled
from tercel.ops.gemm.gemv_glu import portable as fast
from tercel.ops.gemm.gemv_glu import reference as naive
from tercel.ops.gemm.gemv_glu.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.gemv_glu),
    portable(fast.gemv_glu),
    ordered(tiled.gemv_glu),
    kernel("gluon", naive.gemv_glu, triggers_early=False),
    kernel("triton", naive.gemv_glu, triggers_early=False),
)
def gemv_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """The gated product of x times the transposed gate and up weights, for at most 64 rows.

    Args:
        x: [T, K] act, T up to 64; rows contiguous.
        weight: [2 * I, K] act, gate rows then up rows. Kernels read it before the wait for the
            previous launch, which must not write it.
        activation: situ or silu.
        beta, linear_beta: bounds of situ, positive; without linear_beta its up factor is
            unbounded. silu does not read them.
    Returns:
        [T, I] in the dtype of x, newly allocated.
    Raises:
        ContractError: more rows, an odd number of weight rows, a shape or dtype outside the
            contract, an unknown activation, situ without beta.
    Source: as gemm/linear_glu.
    """
