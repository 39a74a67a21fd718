"""One rank's step: plan to device tensors, the work on them, results to the host."""

from collections.abc import Mapping

import torch

from tercel.core.inputs import build_inputs, on_device
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan, TokenLimits, classify
from tercel.runtime.graphs import GraphRunner
from tercel.runtime.step_work import StepWork
from tercel.runtime.verdict import Outcome


class ModelRunner:
    """Owns a rank's caches and runs plans on them. See tercel.runtime.runner.Runner."""

    def __init__(
        self,
        work: StepWork,
        *,
        limits: TokenLimits,
        page_size: int,
        device: torch.device,
        graphs: GraphRunner | None = None,
    ) -> None:
        """`graphs`: the decode steps that are captured, of the same `work`."""
        self._work = work
        self._limits = limits
        self._page_size = page_size
        self._device = device
        self._graphs = graphs

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step; an entry for each row that samples, on the ranks that have logits. The host
        looks at nothing before all of it is launched."""
        if plan.fresh_pages:
            self._work.clear(on_device(plan.fresh_pages, torch.int64, self._device))
        outcome = self._outcome(plan)
        return StepResult(()) if outcome is None else self._work.read(outcome, plan)

    def calls(self) -> Mapping[str, int]:
        """Calls so far per site, op and implementation; under site `step`, how steps ran."""
        return self._work.counts

    def check(self) -> None:
        """Nothing but this process can die."""

    def close(self) -> None:
        """Lets go of weights and caches."""
        del self._work, self._graphs

    def _outcome(self, plan: StepPlan) -> Outcome | None:
        size = None if self._graphs is None else self._graphs.size_of(plan)
        if self._graphs is not None and size is not None:
            return self._graphs.run(plan, size)
        step_class = classify(plan, self._limits)
        self._work.counts[f"step:{step_class}:eager"] += 1
        inputs = build_inputs(plan, page_size=self._page_size, device=self._device)
        logits = self._work.logits(inputs, step_class)
        if logits is None or inputs.draws is None:
            return None
        return self._work.conclude(logits, inputs, plan.num_drafts, self._work.edits(plan))
