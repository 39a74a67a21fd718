"""gemm/gemv_glu as a stream of its weight."""

import torch

from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_gemv import Epilogue, product


def gemv_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    gated = Epilogue(activation=Activation(activation, beta, linear_beta))
    return product(x, weight, gated, streams=False)
