"""A linear layer on torch's fused functions."""

import torch

from tercel.ops._lib import gemm


def gemv(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None) -> torch.Tensor:
    return gemm.linear(x, weight, sigmoid_from)
