"""SwiGLU's product on torch's fused SiLU."""

import torch

from tercel.ops._lib import activation


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return activation.silu_mul(gate_up)
