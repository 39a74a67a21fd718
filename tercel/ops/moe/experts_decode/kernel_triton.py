"""The kernels of tercel/ops/_lib/kernel_experts.py at up to 64 tokens, which read an expert for
each of its slots. Where experts are large and plain they are read once for all of them, in the form
of moe/experts_grouped.
"""

from functools import partial

import torch

from tercel.ops._lib import kernel_experts
from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_grouped_experts import PLAIN, Form, grouped
from tercel.ops._lib.kernel_slot_products import Experts, Matrix

LARGE = 1 << 19
"""Elements of an expert's w13 from which sorting the slots is worth its launches, where there is
more than one token. Chosen by measurement (benchmarks/experts_crossover.py), which also says that
MXFP4 is better read slot by slot than by these products."""


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
    ids_early: bool = False,
    forms: tuple[Form, ...],
) -> torch.Tensor:
    """In the first of `forms` that serves the call, else slot by slot."""
    act = Activation(activation, beta, linear_beta)
    experts = Experts(Matrix(w13, w13_scale), Matrix(w2, w2_scale), first_expert, act)
    form = next((form for form in forms if form.serves(z, experts)), None)
    if form is not None:
        return grouped(z, ids, weights, experts, (form,))
    slots = kernel_experts.Slots(ids, weights, first_expert)
    packed = (w13, w13_scale, w2, w2_scale)
    rows = kernel_experts.Rows(z)
    return kernel_experts.few_tokens(rows, slots, packed, act, ids_early=ids_early)


def _is_large(z: torch.Tensor, experts: Experts) -> bool:
    w13 = experts.up
    return w13.scales is None and len(z) > 1 and w13.values[0].numel() >= LARGE


SHARED = PLAIN._replace(serves=_is_large)

experts_decode = partial(run, forms=(SHARED,))
