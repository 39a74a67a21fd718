"""gemm/gemv as a stream of its weight, on tensor cores where x is bf16 or f16.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

import torch

from tercel.ops._lib.kernel_gemv import Epilogue, product


def gemv(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None) -> torch.Tensor:
    return product(x, weight, Epilogue(sigmoid_from=sigmoid_from), streams=True)
