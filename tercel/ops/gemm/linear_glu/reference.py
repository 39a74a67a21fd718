"""The product rounded, then the activation as its own op has it."""

import torch

from tercel.ops.activation.silu_mul.reference import silu_mul
from tercel.ops.activation.situ_mul.reference import situ_mul
from tercel.ops.gemm.linear.reference import linear


def linear_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    gate_up = linear(x, weight)
    if activation == "silu":
        return silu_mul(gate_up)
    assert beta is not None, "the contract refuses situ without beta"
    return situ_mul(gate_up, beta=beta, linear_beta=linear_beta)
