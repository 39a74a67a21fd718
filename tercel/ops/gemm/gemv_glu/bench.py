"""Gate and up projections of a decode step, beside product and activation in two launches."""

import torch

from tercel.contract import Cell
from tercel.contract.bench import Bench

SITES = (
    ("shared experts", 384, "situ"),
    ("dense MLP", 2112, "situ"),
    ("drafter's MLP", 896, "silu"),
)


def two_launches(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """gemv, then situ_mul or silu_mul."""
    from tercel.ops._lib.kernel_activation import Activation, activation_options, gated_product
    from tercel.ops._lib.kernel_gemv import product

    bounds = activation_options(Activation(activation, beta, linear_beta))
    return gated_product(product(x, weight, streams=True), bounds["BETA"], bounds["LINEAR_BETA"])


BENCH = Bench(
    cells=tuple(
        Cell(what, ("tp16_moetp4ep4",), T=tokens, K=7168, I=width, activation=activation)
        for what, width, activation in SITES
        for tokens in (1, 8, 64)
    ),
    baselines={"two launches": two_launches},
)
