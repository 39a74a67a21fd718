"""Requests of random lengths, cancelled at random, through the engine: is everything given back?

The cache is much smaller than what is asked of it, so that requests wait, are preempted and start
anew; cancellations hit requests that wait, prefill and decode.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import NANO, Model
from tercel.cli.options import Json
from tercel.cli.progress import counting_bar
from tercel.config import EngineConfig, SamplingParams
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.engine import Engine

PAGE = 16
PAGES = 24
RUNNING = 8
WAITING = 4
"""Requests that are given to the engine beyond those that run."""
LONGEST_PROMPT = 150
LONGEST_OUTPUT = 40
CANCELLED = 0.25
"""Share of requests that are cancelled, after a random number of steps."""


@dataclass
class Load:
    """Feeds an engine `total` requests and counts what becomes of them."""

    engine: Engine
    total: int
    rng: random.Random
    ended: Counter[str] = field(default_factory=Counter)
    """By finish reason."""
    most_pages: int = 0
    most_slots: int = 0
    submitted: int = 0
    cancel_at: dict[str, int] = field(default_factory=dict)
    """Request to the step before which it is cancelled."""

    def run(self, report: Callable[[int, int], None]) -> None:
        step = 0
        while self.submitted < self.total or self.engine.has_work:
            self._submit(step)
            self._cancel(step)
            for output in self.engine.step():
                self._count(output.request_id, output.finish_reason)
            usage = self.engine.stats().usage
            self.most_pages = max(self.most_pages, usage.num_used_pages)
            self.most_slots = max(self.most_slots, usage.num_used_slots)
            report(self.ended.total(), self.total)
            step += 1

    def _submit(self, step: int) -> None:
        rng = self.rng
        while self.submitted < self.total and self._num_open < RUNNING + WAITING:
            name = str(self.submitted)
            self.submitted += 1
            length = round(LONGEST_PROMPT ** rng.random())
            prompt = [rng.randrange(256) for _ in range(length)]
            tokens = round(LONGEST_OUTPUT ** rng.random())
            self.engine.add_request(name, prompt, SamplingParams(max_tokens=tokens))
            if rng.random() < CANCELLED:
                self.cancel_at[name] = step + rng.randrange(20)

    def _cancel(self, step: int) -> None:
        for name in [name for name, at in self.cancel_at.items() if at <= step]:
            output = self.engine.abort(name)
            if output is not None:
                self._count(name, output.finish_reason)
            self.cancel_at.pop(name, None)

    def _count(self, name: str, reason: str | None) -> None:
        if reason is not None:
            self.ended[reason] += 1
            self.cancel_at.pop(name, None)

    @property
    def _num_open(self) -> int:
        return self.submitted - self.ended.total()


def main(
    model: Model = NANO,
    requests: Annotated[int, typer.Option(min=1)] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    as_json: Json = False,
) -> None:
    """Requests of random lengths, cancellations included, leave every page and slot free."""
    engine = Engine(config(model, threads, seed), open_model=open_checkpoint)
    load = Load(engine, requests, random.Random(seed))
    with counting_bar("Requests") as report:
        load.run(report)
    publish(Report("Recycling of cache pages and slots", figures(load), settings(load)), as_json)


def config(model: Path, threads: int, seed: int) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        page_size=PAGE,
        cache_tokens=PAGES * PAGE,
        max_running=RUNNING,
        max_step_tokens=96,
        num_threads=threads,
        seed=seed,
    )


def figures(load: Load) -> tuple[Figure, ...]:
    usage = load.engine.stats().usage
    return (
        Figure("requests that ended", load.ended.total(), "=", load.total, ",d"),
        Figure("of these, cancelled", load.ended["abort"], form=",d"),
        Figure("of these, with an error", load.ended["error"], "=", 0, ",d"),
        Figure("preemptions", usage.num_preemptions, form=",d"),
        Figure("most pages in use", load.most_pages, "=", usage.num_pages, ",d"),
        Figure("most slots in use", load.most_slots, "=", usage.num_slots, ",d"),
        Figure("pages in use at the end", usage.num_used_pages, "=", 0, ",d"),
        Figure("slots in use at the end", usage.num_used_slots, "=", 0, ",d"),
    )


def settings(load: Load) -> dict[str, int]:
    return {
        "pages": PAGES,
        "tokens per page": PAGE,
        "slots": RUNNING,
        "tokens per step": load.engine.config.max_step_tokens,
        "longest prompt": LONGEST_PROMPT,
        "longest output": LONGEST_OUTPUT,
        "steps": load.engine.stats().counters.num_steps,
    }


if __name__ == "__main__":
    typer.run(main)
