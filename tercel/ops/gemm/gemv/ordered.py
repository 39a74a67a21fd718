"""The product tile by tile: bits that do not depend on how the ranks divide the weight."""

import torch

from tercel.ops._lib import gemm


def gemv(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None) -> torch.Tensor:
    return gemm.linear(x, weight, sigmoid_from, gemm.ordered_matmul)
