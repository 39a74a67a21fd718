"""gemm/lm_head as a stream of its weight on tensor cores: logits rounded to act, stored as fp32.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

import torch

from tercel.ops._lib.kernel_gemv import Epilogue, product


def lm_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return product(x, weight, Epilogue(dtype=torch.float32), streams=True)
