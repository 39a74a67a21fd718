"""SiTU-GLU in place."""

import torch

from tercel.ops._lib import activation


def situ_mul(gate_up: torch.Tensor, *, beta: float, linear_beta: float | None) -> torch.Tensor:
    return activation.situ_mul(gate_up, beta, linear_beta)
