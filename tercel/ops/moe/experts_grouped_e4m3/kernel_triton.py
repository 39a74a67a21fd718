"""moe/experts_grouped_e4m3: rows to e4m3, then as moe/experts_grouped, with what e4m3 holds widened
for the products."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_row_e4m3 import rows_in_e4m3
from tercel.ops._lib.kernel_slot_products import Config, Experts, Matrix, product
from tercel.ops._lib.kernel_slots import combine, in_chunks, sort

CONFIGS: tuple[tuple[int, Config], ...] = (
    (16, Config(slots=32, stages=4)),
    (128, Config(slots=64, stages=4)),
    (1 << 30, Config(slots=128)),
)
"""The first row whose limit on slots per expert, if all were here, holds a call decides."""


def choose(slots_per_expert: float) -> Config:
    return next(config for most, config in CONFIGS if slots_per_expert <= most)


def experts_grouped_e4m3(
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
) -> torch.Tensor:
    up, down = Matrix(w13, w13_scale, w13_largest), Matrix(w2, w2_scale, w2_largest)
    experts = Experts(up, down, first_expert, Activation(activation, beta, linear_beta))
    run = partial(launch, experts=experts, choose=choose, product=product, four=False)
    return in_chunks(run, z, ids, weights)


def launch(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    choose: Callable[[float], Any],
    product: Callable[..., torch.Tensor],
    four: bool,
) -> torch.Tensor:
    """One chunk of tokens: `choose` says for a number of slots per expert how `product` is cut,
    which wants rows in order of `four` or two."""
    cut = choose(ids.numel() / experts.count)
    slots = sort(ids, experts.first, experts.count, cut.slots)
    hidden = z.new_empty(ids.numel(), experts.width)
    x, scale = rows_in_e4m3(z, four=four)
    product(x, scale, slots, experts.up, hidden, cut, experts.activation)
    outputs = z.new_empty(ids.numel(), z.shape[1])
    x, scale = rows_in_e4m3(hidden, slots, four=four)
    product(x, scale, slots, experts.down, outputs, cut, None)
    return combine(outputs, ids, weights, experts.first, experts.count)
