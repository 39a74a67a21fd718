"""A row's context in windows: each is expanded, attended to and forgotten.

Per query the largest score m, the sum of exp(s - m) and the values so weighted are carried; a
window with a larger score scales them down (the log-sum-exp rule).
"""

from itertools import pairwise

import torch

from tercel.ops._lib.latent import loaded
from tercel.ops.attention.mla_prefill.reference import expand

WINDOW = 512
"""Positions per window, rounded to whole pages."""


def mla_prefill(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    cu_seqlens: tuple[int, ...],
    context_lens: tuple[int, ...],
    scale: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    work = torch.promote_types(q.dtype, torch.float32)
    page_size = pages.shape[1]
    step = max(1, WINDOW // page_size)
    out = q.new_empty(q.shape[0], w_v.shape[0] * w_v.shape[1])
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        context, length = context_lens[row], context_lens[row] + stop - start
        queries = q[start:stop].transpose(0, 1).to(work) * scale
        softmax = _Softmax(queries, w_v.shape[1])
        for page in range(0, -(-length // page_size), step):
            first = page * page_size
            entries = pages.index_select(0, block_table[row, page : page + step]).flatten(0, 1)
            if page_scale is not None:
                entries = loaded(entries, work, page_scale).to(q.dtype)
            keys, values = expand(entries[: length - first], w_k, w_v)
            softmax.add(keys.to(work), values.to(work), first - context)
        out[start:stop] = softmax.outputs().transpose(0, 1).flatten(1)
    return out if gate is None else out * gate


class _Softmax:
    """Running softmax sums of queries [H, T, D] over keys that arrive in order."""

    def __init__(self, queries: torch.Tensor, width: int) -> None:
        self.queries = queries
        self.most = queries.new_full((*queries.shape[:2], 1), -torch.inf)
        self.total = torch.zeros_like(self.most)
        self.mixed = queries.new_zeros(*queries.shape[:2], width)

    def add(self, keys: torch.Tensor, values: torch.Tensor, offset: int) -> None:
        """Keys [H, n, D] and values [H, n, V]; query i sees keys j with j + offset <= i."""
        unseen = max(0, offset)
        queries = self.queries[:, unseen:]
        most, total, mixed = (x[:, unseen:] for x in (self.most, self.total, self.mixed))
        scores = torch.bmm(queries, keys.mT)
        if keys.shape[1] + offset > unseen + 1:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
            scores.masked_fill_(hidden.triu(unseen - offset + 1), -torch.inf)
        highest = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights = scores.sub_(highest).exp_()
        shrink = torch.exp(most - highest)
        most.copy_(highest)
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        mixed.mul_(shrink).baddbmm_(weights, values)

    def outputs(self) -> torch.Tensor:
        return self.mixed / self.total
