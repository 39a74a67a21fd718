"""Decode steps as CUDA graphs: captured once per size before the first request, then replayed.

A graph holds all that a rank does in a step (tercel.runtime.step_work): the target, the drafts that
are kept, the guesses for the next step. Where a request wants the host's hand in its logits, the
graph ends with them. It is captured at a number of rows, of tokens per row and of block-table
columns; a step takes the smallest that holds it, and what is missing reads and writes the sinks.
All graphs share one memory pool: they run one after the other, and their logits land in one place.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from tercel.core.sampling import Draws
from tercel.core.step import StepPlan, TokenLimits
from tercel.errors import EngineError
from tercel.runtime.fixed_inputs import FixedInputs, StepSize, smallest
from tercel.runtime.step_work import StepWork
from tercel.runtime.verdict import Outcome

ROWS = (1, 2, 4, 8, 16, 32, 64)
FEWEST_PAGES = 16
PAGES_FACTOR = 4
"""Block tables have FEWEST_PAGES columns or a power of this times more: what attention reserves
grows with the columns, not with the rows' lengths, which are on the device."""

Replay = Callable[[], None]


class Capture(Protocol):
    """Turns work into something that does it again, reading and writing the same memory."""

    pool_bytes: int
    """Device memory that is held for it so far."""

    def __call__(self, work: Callable[[], None]) -> Replay: ...


@dataclass(frozen=True)
class _Graph:
    replay: Replay
    calls: Counter[str]
    """Per site, op and implementation, of one step: replaying calls no Python."""
    result: torch.Tensor
    """The table of an outcome, or logits."""


class GraphRunner:
    """The decode steps of one rank. Owns their inputs, their graphs and their results."""

    def __init__(
        self,
        work: StepWork,
        sizes: Sequence[StepSize],
        *,
        page_size: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """Captures a graph for each of `sizes`; `capture` is a CudaCapture.

        Raises:
            EngineError: a kernel would have to be compiled during a capture.
        """
        self._work = work
        self._page_size = page_size
        self._sizes = sorted(sizes, key=lambda size: (size.width, size.rows, size.pages))
        self._inputs = FixedInputs(sizes, page_size=page_size, device=device)
        self._logits: torch.Tensor | None = None
        started = time.monotonic()
        # The largest comes first: what it allocates is enough for the others.
        self._graphs = {size: self._captured(size, capture) for size in reversed(self._sizes)}
        self.seconds = time.monotonic() - started
        """That warming up and capturing took."""

    def __len__(self) -> int:
        return len(self._graphs)

    def size_of(self, plan: StepPlan) -> StepSize | None:
        """The smallest size that holds `plan`; None where its step is not captured."""
        if plan.prefill or not plan.verify:
            return None
        return smallest(self._sizes, plan, self._page_size)

    def run(self, plan: StepPlan, size: StepSize) -> Outcome:
        """What the step gave, padded rows last; valid until the next step."""
        graph, counts = self._graphs[size], self._work.counts
        padded = plan.padded(size.rows, size.width, self._page_size)
        self._inputs.fill(padded, size)
        graph.replay()
        counts.update(graph.calls)
        if size.draws is not None:
            counts[f"step:{size.step_class}:graph"] += 1
            return Outcome(graph.result, size.width, size.num_drafts)
        counts[f"step:{size.step_class}:graph_to_logits"] += 1
        inputs, edits = self._inputs.of(size, plan.kind), self._work.edits(padded)
        return self._work.conclude(graph.result, inputs, size.num_drafts, edits)

    def _captured(self, size: StepSize, capture: Capture) -> _Graph:
        self._inputs.fill(StepPlan().padded(size.rows, size.width, self._page_size), size)
        counts, before = self._work.counts, Counter(self._work.counts)
        warm = self._result(size)  # compiles what this size launches
        calls = counts - before
        kept = self._room_for(warm, size)

        def step() -> None:
            kept.copy_(self._result(size))

        replay = capture(step)
        counts.clear()
        counts.update(before)
        return _Graph(replay, calls, kept)

    def _result(self, size: StepSize) -> torch.Tensor:
        """The table of an outcome, or the logits where the graph ends with them."""
        inputs = self._inputs.of(size, size.draws or Draws.GREEDY)
        logits = self._work.logits(inputs, size.step_class)
        if logits is None:
            raise EngineError("decode graphs: a pipeline stage without a head is not captured")
        if size.draws is None:
            return logits
        return self._work.conclude(logits, inputs, size.num_drafts).table

    def _room_for(self, warm: torch.Tensor, size: StepSize) -> torch.Tensor:
        if size.draws is not None:
            return torch.empty_like(warm)
        if self._logits is None:
            most = max(size.tokens for size in self._sizes)
            self._logits = warm.new_empty(most, warm.shape[1])
        return self._logits[: size.tokens]


class CudaCapture:
    """Captures work into graphs of one memory pool. See Capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool_bytes = 0

    def __call__(self, work: Callable[[], None]) -> Replay:
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self._device)
        with no_compilation(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self.pool_bytes += torch.cuda.memory_reserved(self._device) - before
        return graph.replay


def step_sizes(
    max_rows: int,
    max_pages: int,
    limits: TokenLimits,
    *,
    guesses: Callable[[int], int] = lambda rows: 0,
    drafts: bool = False,
) -> list[StepSize]:
    """Of the graphs of an engine: rows and pages up to the first size that holds the most.

    Args:
        guesses: what each row of a step of so many verifies at most.
        drafts: whether as many are drafted in the same step, for the next one.
    """
    rows = [size for size in ROWS if size <= limits.decode_max_tokens]
    pages = [FEWEST_PAGES]
    while pages[-1] < max_pages:
        pages.append(pages[-1] * PAGES_FACTOR)
    pages[-1] = min(pages[-1], max(max_pages, FEWEST_PAGES))
    kept = [size for index, size in enumerate(rows) if index == 0 or rows[index - 1] < max_rows]
    return [
        StepSize(row, width, page, guesses(row) if drafts else 0, draws)
        for row in kept
        for width in sorted({1, 1 + guesses(row)})
        if row * width <= limits.decode_max_tokens
        for page in pages
        for draws in (*Draws, None)
    ]


@contextmanager
def no_compilation() -> Iterator[None]:
    """Within it, a Triton kernel that is not compiled yet raises EngineError."""
    if find_spec("triton") is None:
        yield
        return
    from triton import knobs

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = _refuse
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _refuse(*, repr: str, **_: Any) -> bool:
    raise EngineError(f"{repr} would be compiled while a graph is captured; run its size first")
