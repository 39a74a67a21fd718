"""A linear layer."""

import torch

from tercel.ops.gemm.linear.reference import linear


def gemv(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None) -> torch.Tensor:
    return linear(x, weight, sigmoid_from=sigmoid_from)
