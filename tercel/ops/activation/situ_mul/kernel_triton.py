"""activation/situ_mul."""

import torch

from tercel.ops._lib.kernel_activation import gated_product


def situ_mul(gate_up: torch.Tensor, *, beta: float, linear_beta: float | None) -> torch.Tensor:
    return gated_product(gate_up, beta, linear_beta or 0.0)
