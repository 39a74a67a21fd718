"""Memory that nobody has written holds NaN, so that a kernel which reads it cannot pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Whatever torch allocates meanwhile; operations without a deterministic form raise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poison_new_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Tensor.new_empty returns, for calls beside operations that have no deterministic
    form."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *shape: object, **options: object) -> torch.Tensor:
        fresh = new_empty(self, *shape, **options)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
