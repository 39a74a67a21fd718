"""All requests at once; the noise of all slots is drawn before the chain, which needs it last."""

import torch

from tercel.core.group import Group
from tercel.core.sampling import Stream
from tercel.ops._lib.distribution import argmax_over_ranks
from tercel.ops._lib.dtypes import wide
from tercel.ops._lib.philox import gumbel


def markov_chain(
    base: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    group: Group,
    num_drafts: int,
    greedy: bool = False,
    board: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = base.view(anchors.shape[0], num_drafts, -1)
    noise = None
    if not greedy:
        noise = _noise(seeds, positions, num_drafts, group.rank * base.shape[1], base.shape[1])
        still = (temperature == 0).unsqueeze(1)
        heat = temperature.double().unsqueeze(1).masked_fill(still, 1.0)
    up = None if w2 is None else wide(w2)
    previous, tokens, logits = anchors, [], []
    for slot in range(num_drafts):
        row = blocks[:, slot]
        if w1 is not None and up is not None:
            row = row + torch.nn.functional.linear(wide(w1[previous]), up)
        scores = row
        if noise is not None:
            scores = torch.where(still, row.double(), row.double() / heat + noise[:, slot])
        _, previous = argmax_over_ranks(scores, group)
        tokens.append(previous)
        logits.append(row)
    return torch.stack(tokens, 1), torch.stack(logits, 1).flatten(0, 1)


def _noise(
    seeds: torch.Tensor, positions: torch.Tensor, slots: int, first: int, count: int
) -> torch.Tensor:
    """[R, G, count] of the ids of this rank."""
    streams = (torch.arange(slots, device=seeds.device) + Stream.DRAFT).repeat(seeds.shape[0])
    seeds, positions = (x.repeat_interleave(slots) for x in (seeds, positions))
    return gumbel(seeds, positions, streams, first, count).view(-1, slots, count)
