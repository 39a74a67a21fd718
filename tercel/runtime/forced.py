"""Acceptance by decree, for benchmarks: speed at a given acceptance length, whatever is drafted.

The text is not the model's. Every output of an engine that runs so says it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tercel.core.sampling import Stream
from tercel.core.step import Row
from tercel.ops._lib.philox import uniform


@dataclass(frozen=True)
class ForcedAcceptance:
    """Accepts `mean` drafts per round: the whole part always, one more in that share of rounds."""

    mean: float

    def apply(
        self,
        verified: tuple[torch.Tensor, ...],
        logits: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
        rows: Sequence[Row],
    ) -> tuple[torch.Tensor, ...]:
        """What op accept gave, other drafts kept: (tokens [R, G + 1], accepted [R], finite [R])."""
        device = drafts.device
        seeds = torch.tensor([row.sampling.seed for row in rows], device=device)
        positions = torch.tensor([row.context_len for row in rows], device=device)
        whole = int(self.mean)
        more = uniform(seeds, positions, int(Stream.ACCEPT)) < self.mean - whole
        accepted = torch.minimum(more.long() + whole, num_drafts)
        likeliest = logits.argmax(-1).view(len(rows), -1)
        token = likeliest.gather(1, accepted.unsqueeze(1))
        places = torch.arange(drafts.shape[1] + 1, device=device)
        kept = torch.nn.functional.pad(drafts, (0, 1))
        tokens = torch.where(places < accepted.unsqueeze(1), kept, token)
        return tokens, accepted, verified[2]
