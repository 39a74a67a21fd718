"""The ranks of a layout as threads of this process, behind the interface of the engine."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from tercel.config import EngineConfig
from tercel.core.group import Group, Groups
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan
from tercel.parallel import run_threads
from tercel.runtime.checkpoint import load_weights, open_files, start_rank
from tercel.runtime.model_runner import ModelRunner
from tercel.runtime.runner import OpenModel, ReportProgress


class ThreadRanks:
    """Runs each step on every rank, a thread each. See tercel.runtime.runner.Runner."""

    def __init__(self, ranks: list[ModelRunner], reporting_rank: int) -> None:
        self._ranks = ranks
        self._reporting_rank = reporting_rank
        one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
        self._pool = ThreadPoolExecutor(len(ranks), **one_thread)  # type: ignore[arg-type]

    def run(self, plan: StepPlan) -> StepResult:
        results = list(self._pool.map(lambda rank: rank.run(plan), self._ranks))
        return results[self._reporting_rank]

    def calls(self) -> Mapping[str, int]:
        return self._ranks[self._reporting_rank].calls()

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._pool.shutdown()
        for rank in self._ranks:
            rank.close()


def open_threads(config: EngineConfig) -> OpenModel:
    """As tercel.runtime.checkpoint.open_checkpoint, with threads for processes."""
    opened = open_files(config)
    layout = opened.plan(0).place.layout
    plans = [opened.plan(rank) for rank in range(layout.world_size)]

    def start(world: Group) -> ModelRunner:
        torch.set_num_threads(1)
        plan = plans[world.rank]
        groups = Groups.of(world, layout)
        return start_rank(opened, plan, load_weights(opened, plan, None), groups)

    def load(progress: ReportProgress | None) -> ThreadRanks:
        return ThreadRanks(run_threads(layout.world_size, start), layout.reporting_rank)

    model = opened.model
    return OpenModel(opened.tokenizer, model.vocab_size, model.max_position_embeddings, load)
