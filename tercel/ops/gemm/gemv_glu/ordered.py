"""The product tile by tile: bits that do not depend on how the ranks divide the weight."""

import torch

from tercel.ops._lib import gemm
from tercel.ops._lib.activation import activate


def gemv_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    gate_up = gemm.linear(x, weight, None, gemm.ordered_matmul)
    return activate(gate_up, activation, beta, linear_beta)
