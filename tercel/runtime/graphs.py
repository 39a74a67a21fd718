"""Decode steps as CUDA graphs: captured once per size before the first request, then replayed.

A graph is captured at a number of rows and of block-table columns; a step takes the smallest that
holds it, and rows that are missing read and write the sinks. All graphs share one memory pool: they
run one after the other, and their logits land in one place.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from tercel.core.cache import ModelCache
from tercel.core.drafting import Taps
from tercel.core.inputs import StepInputs
from tercel.core.step import StepClass, StepPlan, TokenLimits
from tercel.errors import EngineError
from tercel.runtime.fixed_inputs import FixedInputs, StepSize

ROWS = (1, 2, 4, 8, 16, 32, 64)
FEWEST_PAGES = 16
PAGES_FACTOR = 4
"""Block tables have FEWEST_PAGES columns or a power of this times more: what attention reserves
grows with the columns, not with the rows' lengths, which are on the device."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


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


@dataclass(frozen=True)
class _Graph:
    replay: Replay
    calls: Counter[str]
    """Per site, op and implementation, of one step: replaying calls no Python."""


class GraphRunner:
    """The decode steps of one rank. Owns their inputs, their graphs and their logits."""

    def __init__(
        self,
        program: Program,
        cache: ModelCache,
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
        self._program = program
        self._cache = cache
        self._sizes = sorted(sizes, key=lambda size: (size.width, size.rows, size.pages))
        largest = StepSize(
            max(size.rows for size in sizes),
            max(size.width for size in sizes),
            max(size.pages for size in sizes),
        )
        self._inputs = FixedInputs(largest, page_size=page_size, device=device)
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
        rows, width = len(plan.verify), plan.tokens_per_verify_row
        pages = max(len(row.pages) for row in plan.verify)
        fitting = (
            size
            for size in self._sizes
            if size.width == width and size.rows >= rows and size.pages >= pages
        )
        return next(fitting, None)

    def run(self, plan: StepPlan, size: StepSize) -> torch.Tensor:
        """Logits [rows * width, vocabulary of this rank] f32, those of padded rows last; valid
        until the next step."""
        graph = self._graphs[size]
        self._inputs.fill(plan.padded(size.rows), size)
        graph.replay()
        self._program.counts.update(graph.calls)
        assert self._logits is not None, "every size was captured"
        return self._logits[: size.tokens]

    def _captured(self, size: StepSize, capture: Capture) -> _Graph:
        inputs, counts = self._inputs.of(size), self._program.counts
        self._inputs.fill(size.idle(), size)
        before = Counter(counts)
        logits = self._run(inputs, size)  # warm: compiles what this size launches
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        calls, target = counts - before, self._logits[: size.tokens]

        def step() -> None:
            target.copy_(self._run(inputs, size))

        replay = capture(step)
        counts.clear()
        counts.update(before)
        return _Graph(replay, calls)

    def _run(self, inputs: StepInputs, size: StepSize) -> torch.Tensor:
        logits = self._program.run(inputs, self._cache, size.step_class)
        if logits is None:
            raise EngineError("decode graphs: a pipeline stage without a head is not captured")
        return logits


class CudaCapture:
    """Captures work into graphs of one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool_bytes = 0
        """Device memory that the graphs hold so far."""

    def __call__(self, work: Callable[[], None]) -> Replay:
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self._device)
        with no_compilation(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self.pool_bytes += torch.cuda.memory_reserved(self._device) - before
        return graph.replay


def step_sizes(max_rows: int, max_pages: int, limits: TokenLimits) -> list[StepSize]:
    """Of the graphs of an engine: rows and pages up to the first size that holds the most."""
    rows = [size for size in ROWS if size <= limits.decode_max_tokens]
    pages = [FEWEST_PAGES]
    while pages[-1] < max_pages:
        pages.append(pages[-1] * PAGES_FACTOR)
    pages[-1] = min(pages[-1], max(max_pages, FEWEST_PAGES))
    kept = [size for index, size in enumerate(rows) if index == 0 or rows[index - 1] < max_rows]
    return [StepSize(row, 1, page) for row in kept for page in pages]


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
