"""What ranks say to each other. Backends are in tercel.parallel.

Sums gather every rank's tensor and add in fp32, in rank order, in chunks of eight ranks, with one
rounding at the end: bits do not depend on the backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tercel.core.layout import Layout
from tercel.core.sums import rank_ordered_sum


class Group(Protocol):
    """A fixed set of ranks that make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, *parts: torch.Tensor) -> torch.Tensor:
        """The sum over ranks and over the equally many parts of each, in that order, in the dtype
        of the parts, newly allocated (a single part of a single rank is returned as it is)."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Every rank's x, concatenated along `dim` in rank order."""
        ...

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's equal slice along `dim` of the sum over ranks."""
        ...

    def all_to_all(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """chunks[r] goes to rank r; returns what each rank sent here, in rank order."""
        ...

    def send(self, x: torch.Tensor, rank: int) -> None: ...

    def recv(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        """A tensor of the shape and dtype of `like` from `rank`."""
        ...

    def vote(self, agree: bool) -> bool:
        """Whether every rank agrees; also a barrier."""
        ...

    def split(self, size: int) -> "Group":
        """The group of those `size` consecutive ranks that this one is among. Every rank calls it
        alike; `size` divides the world."""
        ...


@dataclass(frozen=True)
class Groups:
    """Whom a rank of a layout talks to."""

    world: Group
    """Every rank; pipeline stages hand over through it."""
    tp: Group
    """The ranks of this stage, which share every layer of it."""

    @classmethod
    def of(cls, world: Group, layout: Layout) -> "Groups":
        """Collective."""
        return cls(world, world.split(layout.tp))


class SingleGroup:
    """The group of one rank: every exchange is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, *parts: torch.Tensor) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else rank_ordered_sum(parts)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x

    def all_to_all(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(chunks)

    def send(self, x: torch.Tensor, rank: int) -> None:
        raise ValueError(f"rank: a single rank has no peer {rank}")

    def recv(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        raise ValueError(f"rank: a single rank has no peer {rank}")

    def vote(self, agree: bool) -> bool:
        return agree

    def split(self, size: int) -> "SingleGroup":
        return self
