"""A gated linear unit on torch's fused functions."""

import torch

from tercel.ops._lib import gemm
from tercel.ops._lib.activation import activate


def linear_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    return activate(gemm.linear(x, weight, None), activation, beta, linear_beta)
