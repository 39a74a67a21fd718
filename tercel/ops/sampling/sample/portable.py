"""All rows at once, nothing read on the host."""

import torch

from tercel.ops._lib.distribution import draw, masses
from tercel.ops._lib.philox import uniform


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    stream: int,
    filtered: bool,
    greedy: bool = False,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    largest, tokens = logits.max(-1)
    finite = largest.isfinite()  # NaN and +inf are the largest of a row; -inf is when all are
    if not greedy:
        kept = masses(logits, largest, temperature, top_k, top_p, min_p, filtered=filtered)
        drawn = draw(kept, uniform(seeds, positions, stream))
        tokens = torch.where(temperature == 0, tokens, drawn)
    return tokens.masked_fill_(~finite, 0), finite
