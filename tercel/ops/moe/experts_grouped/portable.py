"""Slots sorted by expert, one product per expert that has any; reads the counts on the host."""

import torch

from tercel.ops._lib.activation import activate
from tercel.ops._lib.experts import combine, local_experts, pack


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
    w13, _, w2, *_ = pack(w13, w13_scale, w2, w2_scale, w13_scale_2, w2_scale_2, dtype=z.dtype)
    tokens, slots = ids.shape
    experts, latent, width = w2.shape
    index, shares = local_experts(ids, weights, first_expert, experts)
    # Slots of other ranks sort behind this rank's, where no product reads them.
    grouped = torch.where(shares == 0, experts, index).view(-1)
    order = grouped.argsort(stable=True)
    counts = torch.bincount(grouped, minlength=experts).tolist()[:experts]
    order = order[: sum(counts)]
    rows = z.index_select(0, order // slots)

    hidden = z.new_empty(len(order), 2 * width)
    _product_per_expert(rows, w13, counts, hidden)
    activated = activate(hidden, activation, beta, linear_beta)
    sorted_outputs = z.new_empty(len(order), latent)
    _product_per_expert(activated, w2, counts, sorted_outputs)
    outputs = z.new_zeros(tokens * slots, latent).index_copy_(0, order, sorted_outputs)
    return combine(outputs.view(tokens, slots, latent), shares)


def _product_per_expert(
    rows: torch.Tensor, matrices: torch.Tensor, counts: list[int], out: torch.Tensor
) -> None:
    start = 0
    for matrix, count in zip(matrices, counts, strict=True):
        if count:
            end = start + count
            torch.mm(rows[start:end], matrix.t(), out=out[start:end])
            start = end
