"""What three planted faults cost in exact match: an accuracy gate that they pass is worth nothing.

Each fault is a program of its own, built from the plan that the engine resolves, so that nothing of
it is in the engine.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import NANO, Model
from tercel.cli.options import Json
from tercel.cli.progress import counting_bar
from tercel.core.cache import ModelCache
from tercel.core.group import Groups
from tercel.core.inputs import StepInputs
from tercel.core.parameters import ModelWeights
from tercel.gates.accuracy import AccuracyGate
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.llm import LLM
from tercel.targets.binding import Bound
from tercel.targets.load import Plan, resolve
from tercel.targets.program import Program

COST = 0.10
"""Exact match that each fault has to cost at least."""


class WrongKdaSlot(Program):
    """Decode rows read and write the state of the slot after their own."""

    def run(self, inputs: StepInputs, cache: ModelCache, *rest: Any) -> torch.Tensor | None:
        verify = inputs.verify
        if verify is not None:
            live = next(iter(cache.kda.values())).recurrent.shape[0] - 1
            inputs = replace(inputs, verify=replace(verify, slots=verify.slots % live + 1))
        return super().run(inputs, cache, *rest)


class DroppedExpert(Program):
    """The expert that weighs most among a token's gives nothing, in every layer. (One expert that
    is silent for all tokens hardly shows: most tokens have three others.)"""

    def __post_init__(self) -> None:
        self.binding = {
            step_class: {**bound, "experts": without_first_expert(bound["experts"])}
            for step_class, bound in self.binding.items()
        }
        super().__post_init__()


def without_first_expert(bound: Bound) -> Bound:
    run = bound.implementation.run

    def experts(
        z: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        dropped = weights.argmax(1, keepdim=True)
        return run(z, ids, weights.scatter(1, dropped, 0.0), *rest, **options)

    return replace(bound, implementation=replace(bound.implementation, run=experts))


class AnotherLayersState(Program):
    """The second KDA layer keeps its state where the first one keeps its own."""

    def run(self, inputs: StepInputs, cache: ModelCache, *rest: Any) -> torch.Tensor | None:
        first, second, *_ = cache.kda
        kda = {**cache.kda, second: cache.kda[first]}
        return super().run(inputs, replace(cache, kda=kda), *rest)


FAULTS: dict[str, type[Program]] = {
    "wrong KDA slot": WrongKdaSlot,
    "dropped expert": DroppedExpert,
    "another layer's state": AnotherLayersState,
}


@dataclass(frozen=True)
class FaultyPlan(Plan):
    """A plan whose program has a fault."""

    fault: type[Program]

    def program(self, weights: ModelWeights, groups: Groups) -> Program:
        return self.fault(self.route.row, self.binding, weights, groups, self.place)


def with_fault(fault: type[Program], *args: Any, **options: Any) -> FaultyPlan:
    """Resolves as ever, then plants the fault."""
    return FaultyPlan(**vars(resolve(*args, **options)), fault=fault)


def exact_match(
    model: Path, gate: AccuracyGate, fault: type[Program], threads: int, name: str
) -> float:
    open_model = partial(open_checkpoint, resolve=partial(with_fault, fault))
    options: dict[str, Any] = {
        "max_running": gate.batch,
        "num_threads": threads,
        "dtype": "float32",
    }
    with LLM(model, open_model=open_model, **options) as llm, counting_bar(name) as report:
        return gate.run(llm, report).exact_match


def main(
    model: Model = NANO,
    problems: Annotated[int, typer.Option(min=1, help="Problems per run.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of the problems.")] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    as_json: Json = False,
) -> None:
    """Exact match of a trained checkpoint without and with each planted fault."""
    gate = AccuracyGate(problems, held_out=0, calculator=0, seed=seed, max_tokens=max_tokens)
    programs: dict[str, type[Program]] = {"no fault": Program, **FAULTS}
    measured = {
        name: exact_match(model, gate, program, threads, name.capitalize())
        for name, program in programs.items()
    }
    healthy = measured["no fault"]
    figures = [Figure("exact match", healthy, form=".1%")]
    for name in FAULTS:
        figures.append(Figure(f"exact match, {name}", measured[name], form=".1%"))
        figures.append(Figure(f"cost of {name}", healthy - measured[name], ">=", COST, ".1%"))
    settings = {"problems": problems, "max_tokens": max_tokens, "seed": seed, "threads": threads}
    title = "Planted faults: what each costs in exact match, greedy"
    publish(Report(title, tuple(figures), settings), as_json)


if __name__ == "__main__":
    typer.run(main)
