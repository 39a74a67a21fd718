"""Gated activations in few torch calls; gate_up [..., 2 * I] holds the gate, then the up half."""

import torch

from tercel.ops._lib.dtypes import wide


def situ_mul(gate_up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """act(beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta))."""
    gate, up = wide(gate_up).chunk(2, -1)
    product = torch.sigmoid(gate).mul_((gate / beta).tanh_())
    if linear_beta is None:
        product.mul_(up).mul_(beta)
    else:
        product.mul_((up / linear_beta).tanh_()).mul_(beta * linear_beta)
    return product.to(gate_up.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """act(act(silu(gate)) * up)."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)


def activate(
    gate_up: torch.Tensor, name: str, beta: float | None, linear_beta: float | None
) -> torch.Tensor:
    """The gated product of [..., 2 * I] by situ or silu, rounded to act."""
    if name == "silu":
        return silu_mul(gate_up)
    assert beta is not None, "contracts refuse situ without beta"
    return situ_mul(gate_up, beta, linear_beta)
