"""gemm/linear_glu in two launches: torch's product, and a kernel for the activation."""

import torch

from tercel.ops._lib.kernel_activation import Activation, activation_options, gated_product


def linear_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    bounds = activation_options(Activation(activation, beta, linear_beta))
    gate_up = torch.nn.functional.linear(x, weight)
    return gated_product(gate_up, bounds["BETA"], bounds["LINEAR_BETA"])
