"""Token by token over the whole vocabulary, with a Philox in Python integers."""

import torch

from tercel.core.group import Group
from tercel.core.sampling import Stream
from tercel.ops._lib.dtypes import wide
from tercel.ops.sampling.sample.reference import WORD, philox


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
    whole = group.all_gather(base, dim=-1).view(anchors.shape[0], num_drafts, -1)
    up = None if w2 is None else wide(group.all_gather(w2))
    logits = whole.clone()
    tokens: list[list[int]] = []
    for r, rows in enumerate(logits):
        tokens.append([])
        previous = int(anchors[r])
        for slot, row in enumerate(rows):
            if w1 is not None and up is not None:
                row += up @ wide(w1[previous])
            scores = row.double()
            if temperature[r] > 0:
                noise = _gumbel(len(row), int(seeds[r]), int(positions[r]), Stream.DRAFT + slot)
                scores = scores / temperature[r].double() + noise.to(row.device)
            previous = int(scores.argmax())
            tokens[-1].append(previous)
    part = logits.flatten(0, 1).chunk(group.world_size, -1)[group.rank]
    return torch.tensor(tokens, dtype=torch.int64, device=base.device), part.contiguous()


def _gumbel(count: int, seed: int, position: int, stream: int) -> torch.Tensor:
    """[count] fp64: four ids share a counter (position, stream, id // 4), a word each."""
    words: list[int] = []
    for block in range(-(-count // 4)):
        words += philox((position & WORD, position >> 32 & WORD, stream, block), seed)
    u = (torch.tensor(words[:count], dtype=torch.float64) + 0.5) / 2.0**32
    return -(-u.log()).log()
