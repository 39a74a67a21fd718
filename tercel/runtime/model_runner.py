"""One rank's step: plan to device tensors, program, sampler, results to the host."""

from collections.abc import Mapping
from typing import Protocol

import torch

from tercel.core.cache import ModelCache
from tercel.core.drafting import Taps
from tercel.core.inputs import StepInputs, build_inputs
from tercel.core.sampling import StepResult
from tercel.core.step import StepClass, StepPlan, TokenLimits, classify
from tercel.runtime.draft_runner import DraftRunner, TapBuffer
from tercel.runtime.sampler import Sampler


class Program(Protocol):
    """What tercel.targets resolves a configuration to."""

    @property
    def counts(self) -> Mapping[str, int]:
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


class ModelRunner:
    """Owns a rank's caches and runs plans on them. See tercel.runtime.runner.Runner."""

    def __init__(
        self,
        program: Program,
        cache: ModelCache,
        sampler: Sampler,
        *,
        limits: TokenLimits,
        page_size: int,
        device: torch.device,
        row_buckets: tuple[int, ...] = (),
        tap_buffer: TapBuffer | None = None,
        drafts: DraftRunner | None = None,
    ) -> None:
        """
        Args:
            row_buckets: row counts, ascending, that steps without prefill are padded to.
            tap_buffer: where a step leaves what a drafter reads; None: nothing drafts.
            drafts: the drafter, on the ranks of the last pipeline stage.
        """
        self._program = program
        self._cache = cache
        self._sampler = sampler
        self._limits = limits
        self._page_size = page_size
        self._device = device
        self._row_buckets = row_buckets
        self._tap_buffer = tap_buffer
        self._drafts = drafts

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step: target, sampling and acceptance, guesses for the next step, and one look at all
        that; an entry for each row that samples, on the ranks that have logits."""
        self._clear(plan.fresh_pages)
        padded = self._padded(plan)
        inputs = build_inputs(padded, page_size=self._page_size, device=self._device)
        taps = None if self._tap_buffer is None else self._tap_buffer.of(padded.num_tokens)
        logits = self._program.run(inputs, self._cache, classify(padded, self._limits), taps)
        if self._drafts is not None and taps is not None:
            self._drafts.write_context(taps, padded, inputs)
        num_draws = len(plan.draws)
        if logits is None or not num_draws:
            return StepResult(())
        proposed = None if self._drafts is None else self._drafts.proposed(plan, inputs)
        verdict = self._sampler.run(logits[:num_draws], plan, proposed)
        drafted = None if self._drafts is None else self._drafts.draft(plan, inputs, verdict)
        return self._sampler.read(verdict, plan, drafted)

    def calls(self) -> Mapping[str, int]:
        """Calls so far per site, op and implementation."""
        return self._program.counts

    def check(self) -> None:
        """Nothing but this process can die."""

    def close(self) -> None:
        """Lets go of weights and caches."""
        del self._program, self._cache, self._drafts, self._tap_buffer

    def _clear(self, pages: tuple[int, ...]) -> None:
        if pages:
            index = torch.tensor(pages, device=self._device)
            for layer in self._cache.latent.values():
                layer.pages.index_fill_(0, index, 0)
            if self._drafts is not None:
                self._drafts.clear(index)

    def _padded(self, plan: StepPlan) -> StepPlan:
        """Padded rows come last, and so do their logits."""
        if plan.prefill:
            return plan
        rows = len(plan.verify)
        return plan.padded(next((size for size in self._row_buckets if size >= rows), rows))
