"""The routed experts of many tokens: every product on tensor cores, a block of rows of one expert
at a time.

1. sort:    per expert of this rank, its slots in order, and how many there are
2. FC1:     h = act(activation(act(w13 @ z)))       for blocks of one expert's slots
3. FC2:     t = act(w2 @ h)
4. combine: y = act(sum of weights * t)             over a token's slots, in order

What differs between implementations is the form of the two products.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_slot_products import Experts, Matrix, choose, product, rows_in_act
from tercel.ops._lib.kernel_slots import Slots, combine, in_chunks, sort


class Form(NamedTuple):
    """How the products of sorted slots are made."""

    choose: Callable[[float], Any]
    """Slots per expert, if all were here, to how a product is cut into programs."""
    product: Callable[..., torch.Tensor]
    """As kernel_slot_products.product."""
    rows: Callable[[torch.Tensor, Slots | None, Experts], tuple[torch.Tensor, torch.Tensor | None]]
    """Rows as a product reads them, and their scales: z, or with slots what FC1 wrote."""
    serves: Callable[[torch.Tensor, Experts], bool] = lambda z, experts: True
    columns: Callable[[Any, Experts], int] = lambda cut, experts: experts.width
    """Of a row that FC1 writes."""


def grouped(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
    forms: tuple[Form, ...],
) -> torch.Tensor:
    """The weighted sum of this rank's chosen experts [T, L], in the first form that serves them."""
    form = next(form for form in forms if form.serves(z, experts))

    def run(z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        cut = form.choose(ids.numel() / experts.count)
        slots = sort(ids, experts.first, experts.count, cut.slots)
        hidden = z.new_empty(ids.numel(), form.columns(cut, experts))
        rows = form.rows(z, None, experts)
        form.product(*rows, slots, experts.up, hidden, cut, experts.activation)
        outputs = z.new_empty(ids.numel(), z.shape[1])
        rows = form.rows(hidden, slots, experts)
        form.product(*rows, slots, experts.down, outputs, cut, None)
        return combine(outputs, ids, weights, experts.first, experts.count)

    return in_chunks(run, z, ids, weights)


PLAIN = Form(choose, product, rows_in_act)


def experts_of_act(
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
    forms: tuple[Form, ...] = (PLAIN,),
) -> torch.Tensor:
    """As moe/experts_grouped, with its weights packed."""
    up, down = Matrix(w13, w13_scale), Matrix(w2, w2_scale)
    experts = Experts(up, down, first_expert, Activation(activation, beta, linear_beta))
    return grouped(z, ids, weights, experts, forms)
