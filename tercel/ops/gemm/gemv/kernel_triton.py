"""gemm/gemv as a stream of its weight."""

import torch

from tercel.ops._lib.kernel_gemv import Epilogue, product


def gemv(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None) -> torch.Tensor:
    return product(x, weight, Epilogue(sigmoid_from=sigmoid_from), streams=False)
