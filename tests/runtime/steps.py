"""Steps on a CPU without a model: what a sampler makes of given logits."""

import torch

from tercel.core.inputs import build_inputs
from tercel.runtime.verdict import Outcome

CPU = torch.device("cpu")
PAGE_SIZE = 64


def drawn(sampler, logits, plan):
    """The rows of the result of `plan`."""
    inputs = build_inputs(plan, page_size=PAGE_SIZE, device=CPU)
    verdict = sampler.run(logits.clone(), inputs, sampler.edits(plan))
    return sampler.read(Outcome.of(verdict, None), plan).rows
