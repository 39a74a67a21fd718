"""The group of one rank: every exchange is the identity."""

from collections.abc import Sequence

import torch

from tercel.parallel.sums import rank_ordered_sum


class SingleGroup:
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
