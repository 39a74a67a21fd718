"""gemm/linear_f32 as a stream of its weight on tensor cores, not rounded.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

import torch

from tercel.ops._lib.kernel_gemv import Epilogue, product


def linear_f32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return product(x, weight, Epilogue(rounded=False, dtype=torch.float32), streams=True)
