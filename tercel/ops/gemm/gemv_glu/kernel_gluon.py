"""gemm/gemv_glu as a stream of its weight, on tensor cores where x is bf16 or f16.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

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
    return product(x, weight, gated, streams=True)
