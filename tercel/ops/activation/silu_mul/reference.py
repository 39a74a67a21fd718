"""SwiGLU's product, written as its formula."""

import torch

from tercel.ops._lib.dtypes import wide


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    silu = wide(gate) * torch.sigmoid(wide(gate))
    return silu.to(gate_up.dtype) * up
