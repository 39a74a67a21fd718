"""Group operations that follow from one primitive: everybody's tensors, in rank order."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tercel.core.group import Group
from tercel.core.sums import rank_ordered_sum


class ExchangeGroup(ABC):
    """A group that can gather lists of equal-shaped tensors and pass single ones."""

    rank: int
    world_size: int

    @abstractmethod
    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's x, in rank order. Shapes and dtypes are equal."""

    @abstractmethod
    def all_to_all(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    @abstractmethod
    def send(self, x: torch.Tensor, rank: int) -> None: ...

    @abstractmethod
    def recv(self, like: torch.Tensor, rank: int) -> torch.Tensor: ...

    @abstractmethod
    def split(self, size: int) -> Group: ...

    def all_reduce(self, *parts: torch.Tensor) -> torch.Tensor:
        if len(parts) == 1:
            return rank_ordered_sum(self.gather(parts[0]))
        gathered = self.gather(torch.stack(parts))
        return rank_ordered_sum([part for of_rank in gathered for part in of_rank])

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self.gather(x), dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        size = x.shape[dim]
        if size % self.world_size:
            raise ValueError(f"dim {dim}: {size} rows do not divide by {self.world_size} ranks")
        return self.all_reduce(x).chunk(self.world_size, dim=dim)[self.rank].contiguous()

    def vote(self, agree: bool) -> bool:
        votes = self.gather(torch.tensor([agree], dtype=torch.uint8))
        return all(bool(vote) for vote in votes)


def consecutive_parts(world_size: int, size: int) -> list[range]:
    """The ranks of each part of `size`; ValueError where they do not divide."""
    if size < 1 or world_size % size:
        raise ValueError(f"size: {world_size} ranks do not divide into groups of {size}")
    return [range(start, start + size) for start in range(0, world_size, size)]
