"""What the engine needs of a model: a tokenizer, two sizes, and something that runs plans."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan
from tercel.runtime.tokenizer import Tokenizer


class ReportProgress(Protocol):
    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Called while the weights load."""


class Runner(Protocol):
    """Runs steps on one rank or on many; owns weights and caches."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step: rows through the model, then a token for each row that samples."""
        ...

    def calls(self) -> Mapping[str, int]:
        """Calls so far per site, op and implementation."""
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
