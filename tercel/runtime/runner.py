"""What the engine needs of a model: a tokenizer, two sizes, and something that runs plans."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan
from tercel.runtime.tokenizer import Tokenizer


class ReportProgress(Protocol):
    def __call__(self, done_bytes: int, total_bytes: int, waiting: str = "") -> None:
        """Called while the weights load, with bytes of all ranks; `waiting` names ranks that the
        others wait for."""


def throttled(report: ReportProgress, interval_s: float = 0.1) -> ReportProgress:
    """Passes progress on, but not for each of many small tensors."""
    latest = 0.0

    def pass_on(done_bytes: int, total_bytes: int, waiting: str = "") -> None:
        nonlocal latest
        now = time.monotonic()
        if done_bytes == total_bytes or now - latest >= interval_s:
            latest = now
            report(done_bytes, total_bytes, waiting)

    return pass_on


class Runner(Protocol):
    """Runs steps on one rank or on many; owns weights and caches."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step: rows through the model, then a token for each row that samples."""
        ...

    def calls(self) -> Mapping[str, int]:
        """Calls so far per site, op and implementation."""
        ...

    def check(self) -> None:
        """Raises EngineError where the next step cannot run: another process has died."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class OpenModel:
    """A model whose configuration is read and whose weights are not."""

    tokenizer: Tokenizer
    vocab_size: int
    max_position_embeddings: int
    load: Callable[[ReportProgress | None], Runner]
    """Reads the weights."""
    max_drafts: int = 0
    """Guesses per step that its drafter was trained for; 0: it has none."""
