"""moe/experts_grouped: every product on tensor cores, a block of rows of one expert at a time.

1. sort:    per expert of this rank, its slots in order, and how many there are
2. FC1:     h = act(activation(act(w13 @ z)))       for blocks of one expert's slots
3. FC2:     t = act(w2 @ h)
4. combine: y = act(sum of weights * t)             over a token's slots, in order
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_slot_products import Config, Experts, Matrix, product, reordered
from tercel.ops._lib.kernel_slots import combine, in_chunks, sort

CONFIGS: tuple[tuple[int, Config], ...] = (
    (16, Config(slots=32, stages=4)),
    (128, Config(slots=64, stages=4)),
    (1 << 30, Config(slots=128)),
)
"""The first row whose limit on slots per expert, if all were here, holds a call decides;
benchmarks/experts_prefill.py measures them."""


def choose(slots_per_expert: float) -> Config:
    return next(config for most, config in CONFIGS if slots_per_expert <= most)


def experts_grouped(
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
) -> torch.Tensor:
    up, down = Matrix(w13, w13_scale), Matrix(w2, w2_scale)
    experts = Experts(up, down, first_expert, Activation(activation, beta, linear_beta))
    return in_chunks(
        partial(launch, experts=experts, choose=choose, product=product), z, ids, weights
    )


def launch(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    choose: Callable[[float], Any],
    product: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """One chunk of tokens: `choose` says for a number of slots per expert how `product` is cut."""
    cut = choose(ids.numel() / experts.count)
    slots = sort(ids, experts.first, experts.count, cut.slots)
    is_tiled = experts.up.scales is not None
    x = reordered(z) if is_tiled else z
    hidden = z.new_empty(ids.numel(), experts.width)
    product(x, None, slots, experts.up, hidden, cut, experts.activation)
    outputs = z.new_empty(ids.numel(), z.shape[1])
    product(hidden, None, slots, experts.down, outputs, cut, None)
    return combine(outputs, ids, weights, experts.first, experts.count)
