"""One rank's step: plan to device tensors, program, sampler, guesses, results to the host."""

from collections.abc import Mapping

import torch

from tercel.core.cache import ModelCache
from tercel.core.inputs import StepInputs, build_inputs, on_device
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan, TokenLimits, classify
from tercel.runtime.draft_runner import DraftRunner
from tercel.runtime.graphs import GraphRunner, Program
from tercel.runtime.sampler import Sampler


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
        graphs: GraphRunner | None = None,
        drafting: DraftRunner | None = None,
    ) -> None:
        """`graphs`: the decode steps that are captured; `drafting`: what makes guesses for the next
        step from what the target saw in this one."""
        self._program = program
        self._cache = cache
        self._sampler = sampler
        self._limits = limits
        self._page_size = page_size
        self._device = device
        self._graphs = graphs
        self._drafting = drafting

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step; an entry for each row that samples, on the ranks that have logits. The host
        looks at nothing before all of it is launched."""
        self._clear(plan.fresh_pages)
        if self._drafting is not None:
            return self._run_drafting(plan, self._drafting)
        logits, num_draws = self._logits(plan), len(plan.draws)
        if logits is None or not num_draws:
            return StepResult(())
        return self._sampler.read(self._sampler.run(logits[:num_draws], plan), plan)

    def calls(self) -> Mapping[str, int]:
        """Calls so far per site, op and implementation."""
        return self._program.counts

    def check(self) -> None:
        """Nothing but this process can die."""

    def close(self) -> None:
        """Lets go of weights and caches."""
        del self._program, self._cache, self._graphs, self._drafting

    def _run_drafting(self, plan: StepPlan, drafting: DraftRunner) -> StepResult:
        """Target, context rows of its tokens, acceptance, guesses."""
        inputs = self._inputs(plan)
        taps = drafting.taps.of(plan.num_tokens)
        logits = self._program.run(inputs, self._cache, classify(plan, self._limits), taps)
        drafting.write_context(taps, plan, inputs)
        if logits is None or not plan.draws:
            return StepResult(())
        verdict = self._sampler.run(logits, plan, drafting.proposed(plan, inputs))
        return self._sampler.read(verdict, plan, drafting.draft(plan, inputs, verdict))

    def _logits(self, plan: StepPlan) -> torch.Tensor | None:
        size = None if self._graphs is None else self._graphs.size_of(plan)
        if self._graphs is not None and size is not None:
            return self._graphs.run(plan, size)
        return self._program.run(self._inputs(plan), self._cache, classify(plan, self._limits))

    def _inputs(self, plan: StepPlan) -> StepInputs:
        return build_inputs(plan, page_size=self._page_size, device=self._device)

    def _clear(self, pages: tuple[int, ...]) -> None:
        if pages:
            index = on_device(pages, torch.int64, self._device)
            for layer in self._cache.latent.values():
                layer.pages.index_fill_(0, index, 0)
            if self._drafting is not None:
                self._drafting.clear(index)
