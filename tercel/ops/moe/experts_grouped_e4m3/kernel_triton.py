"""moe/experts_grouped_e4m3: rows to e4m3, then as moe/experts_grouped, with what e4m3 holds widened
for the products."""

from functools import partial

import torch

from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_grouped_experts import Form, grouped
from tercel.ops._lib.kernel_row_e4m3 import rows_in_e4m3
from tercel.ops._lib.kernel_slot_products import Experts, Matrix, choose, product

PLAIN = Form(choose, product, lambda x, slots, _: rows_in_e4m3(x, slots, four=False))


def run(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_largest: torch.Tensor | None = None,
    w2_largest: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    forms: tuple[Form, ...],
) -> torch.Tensor:
    up, down = Matrix(w13, w13_scale, w13_largest), Matrix(w2, w2_scale, w2_largest)
    experts = Experts(up, down, first_expert, Activation(activation, beta, linear_beta))
    return grouped(z, ids, weights, experts, forms)


experts_grouped_e4m3 = partial(run, forms=(PLAIN,))
