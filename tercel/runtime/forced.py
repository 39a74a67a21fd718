"""Acceptance by decree, for benchmarks: speed at a given acceptance length, whatever is drafted.

The text is not the model's. Every output of an engine that runs so says it.
"""

from dataclasses import dataclass

import torch

from tercel.core.inputs import StepInputs
from tercel.core.sampling import Stream
from tercel.ops._lib.philox import uniform


@dataclass(frozen=True)
class ForcedAcceptance:
    """Accepts `mean` drafts per round: the whole part always, one more in that share of rounds."""

    mean: float

    def apply(
        self,
        verified: tuple[torch.Tensor, ...],
        logits: torch.Tensor,
        inputs: StepInputs,
        seeds: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """What op accept gave, other drafts kept: (tokens [R, G + 1], accepted [R], finite [R])."""
        verify, drafts = inputs.verify, inputs.drafts
        assert verify is not None
        whole = int(self.mean)
        more = uniform(seeds, verify.context_lens, int(Stream.ACCEPT)) < self.mean - whole
        accepted = torch.minimum(more.long() + whole, verify.num_drafts)
        likeliest = logits.argmax(-1).view(len(seeds), -1)
        token = likeliest.gather(1, accepted.unsqueeze(1))
        places = torch.arange(verify.width, device=drafts.device)
        kept = torch.nn.functional.pad(drafts, (0, 1))
        tokens = torch.where(places < accepted.unsqueeze(1), kept, token)
        return tokens, accepted, verified[2]
