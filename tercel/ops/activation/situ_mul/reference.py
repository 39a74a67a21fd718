"""SiTU-GLU, written as its formula."""

import torch

from tercel.ops._lib.dtypes import wide


def situ_mul(gate_up: torch.Tensor, *, beta: float, linear_beta: float | None) -> torch.Tensor:
    gate, up = wide(gate_up).chunk(2, dim=-1)
    bounded_gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    bounded_up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return (bounded_gate * bounded_up).to(gate_up.dtype)
