"""One rank's step: plan to device tensors, program, sampler, results to the host."""

from collections.abc import Mapping

import torch

from tercel.core.cache import ModelCache
from tercel.core.inputs import build_inputs, on_device
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan, TokenLimits, classify
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
        row_buckets: tuple[int, ...] = (),
        graphs: GraphRunner | None = None,
    ) -> None:
        """`row_buckets`: row counts, ascending, that steps without prefill are padded to;
        `graphs`: the decode steps that are captured."""
        self._program = program
        self._cache = cache
        self._sampler = sampler
        self._limits = limits
        self._page_size = page_size
        self._device = device
        self._row_buckets = row_buckets
        self._graphs = graphs

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step; an entry for each row that samples, on the ranks that have logits."""
        self._clear(plan.fresh_pages)
        logits, draws = self._logits(plan), plan.draws
        if logits is None or not draws:
            return StepResult(())
        return self._sampler.run(logits[: len(draws)], draws)

    def calls(self) -> Mapping[str, int]:
        """Calls so far per site, op and implementation."""
        return self._program.counts

    def check(self) -> None:
        """Nothing but this process can die."""

    def close(self) -> None:
        """Lets go of weights and caches."""
        del self._program, self._cache, self._graphs

    def _logits(self, plan: StepPlan) -> torch.Tensor | None:
        size = None if self._graphs is None else self._graphs.size_of(plan)
        if self._graphs is not None and size is not None:
            return self._graphs.run(plan, size)
        padded = self._padded(plan)
        inputs = build_inputs(padded, page_size=self._page_size, device=self._device)
        return self._program.run(inputs, self._cache, classify(padded, self._limits))

    def _clear(self, pages: tuple[int, ...]) -> None:
        if pages:
            index = on_device(pages, torch.int64, self._device)
            for layer in self._cache.latent.values():
                layer.pages.index_fill_(0, index, 0)

    def _padded(self, plan: StepPlan) -> StepPlan:
        """Padded rows come last, and so do their logits."""
        if plan.prefill:
            return plan
        rows = len(plan.verify)
        return plan.padded(next((size for size in self._row_buckets if size >= rows), rows))
