"""moe/experts_grouped as tercel/ops/_lib/kernel_grouped_experts.py says."""

from functools import partial

import torch

from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_grouped_experts import Form, grouped
from tercel.ops._lib.kernel_slot_products import Experts, Matrix, choose, product, rows_in_act

PLAIN = Form(choose, product, rows_in_act)


def run(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w13_scale_2: torch.Tensor | None = None,
    w2_scale_2: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    forms: tuple[Form, ...],
) -> torch.Tensor:
    up, down = Matrix(w13, w13_scale), Matrix(w2, w2_scale)
    experts = Experts(up, down, first_expert, Activation(activation, beta, linear_beta))
    return grouped(z, ids, weights, experts, forms)


experts_grouped = partial(run, forms=(PLAIN,))
