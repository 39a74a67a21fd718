"""A gated linear unit."""

import torch

from tercel.ops.gemm.linear_glu.reference import linear_glu


def gemv_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    return linear_glu(x, weight, activation=activation, beta=beta, linear_beta=linear_beta)
