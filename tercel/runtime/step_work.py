"""What a rank does in a step. On the device it reads `StepInputs` and nothing of the plan, so that
the same work runs op by op or as a captured graph."""

from collections import Counter
from typing import Protocol

import torch

from tercel.core.cache import ModelCache
from tercel.core.drafting import Taps
from tercel.core.inputs import StepInputs
from tercel.core.sampling import StepResult
from tercel.core.step import StepClass, StepPlan
from tercel.runtime.draft_runner import DraftRunner
from tercel.runtime.edits import Edits
from tercel.runtime.sampler import Sampler
from tercel.runtime.verdict import Outcome


class Program(Protocol):
    """What tercel.targets resolves a configuration to."""

    @property
    def counts(self) -> Counter[str]:
        """Calls so far per site, op and implementation."""
        ...

    def run(
        self,
        inputs: StepInputs,
        cache: ModelCache,
        step_class: StepClass,
        taps: Taps | None = None,
    ) -> torch.Tensor | None:
        """Logits of the sampled rows [S, vocabulary of this rank] f32, None before the last
        pipeline stage; updates the caches, and writes `taps`."""
        ...


class StepWork:
    """A step in two parts: the model up to its logits, then what follows from them."""

    def __init__(
        self,
        program: Program,
        cache: ModelCache,
        sampler: Sampler,
        drafting: DraftRunner | None = None,
    ) -> None:
        """`drafting` makes guesses for the next step from what the target sees in this one."""
        self._program = program
        self._cache = cache
        self._sampler = sampler
        self._drafting = drafting

    @property
    def counts(self) -> Counter[str]:
        """Calls so far per site, op and implementation."""
        return self._program.counts

    def logits(self, inputs: StepInputs, step_class: StepClass) -> torch.Tensor | None:
        """Of every draw [S, vocabulary of this rank] f32; None before the last pipeline stage.
        Caches and the drafter's context hold the step's tokens afterwards."""
        if self._drafting is None:
            return self._program.run(inputs, self._cache, step_class)
        taps = self._drafting.taps.of(inputs.tokens.shape[0])
        logits = self._program.run(inputs, self._cache, step_class, taps)
        self._drafting.write_context(taps, inputs)
        return logits

    def conclude(
        self,
        logits: torch.Tensor,
        inputs: StepInputs,
        num_drafts: int,
        edits: Edits | None = None,
    ) -> Outcome:
        """Draws, keeps drafts, and makes `num_drafts` guesses of what follows; writes `logits`.
        Only `edits` come from the host."""
        if self._drafting is None:
            return Outcome.of(self._sampler.run(logits, inputs, edits), None)
        proposed = self._drafting.proposed(inputs)
        verdict = self._sampler.run(logits, inputs, edits, proposed)
        return Outcome.of(verdict, self._drafting.draft(inputs, verdict, num_drafts))

    def edits(self, plan: StepPlan) -> Edits | None:
        """What the host does to the logits of a step; None: nothing."""
        return self._sampler.edits(plan)

    def read(self, outcome: Outcome, plan: StepPlan) -> StepResult:
        """The results on the host, one per request that samples; waits for the device."""
        return self._sampler.read(outcome, plan)

    def clear(self, pages: torch.Tensor) -> None:
        """Zeroes pages that requests have just been given."""
        for layer in self._cache.latent.values():
            layer.pages.view(torch.uint8).index_fill_(0, pages, 0)
        if self._drafting is not None:
            self._drafting.clear(pages)
