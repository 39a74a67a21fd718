"""Ranks as processes, over torch.distributed (gloo on hosts, NCCL on GPUs)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tercel.parallel.exchange import ExchangeGroup, consecutive_parts


class DistributedGroup(ExchangeGroup):
    """A torch.distributed process group. Bytes travel as uint8: gloo carries no fp8."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        source = _as_bytes(x)
        parts = [torch.empty_like(source) for _ in range(self.world_size)]
        dist.all_gather(parts, source, group=self._group)
        return [_from_bytes(part, x) for part in parts]

    def all_to_all(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        received = [torch.empty_like(_as_bytes(chunk)) for chunk in chunks]
        requests = []
        for peer, chunk in enumerate(chunks):
            if peer == self.rank:
                received[peer].copy_(_as_bytes(chunk))
                continue
            requests.append(dist.isend(_as_bytes(chunk), self._global(peer), group=self._group))
            requests.append(dist.irecv(received[peer], self._global(peer), group=self._group))
        for request in requests:
            if request is not None:
                request.wait()
        return [_from_bytes(part, like) for part, like in zip(received, chunks, strict=True)]

    def send(self, x: torch.Tensor, rank: int) -> None:
        dist.send(_as_bytes(x), self._global(rank), group=self._group)

    def recv(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        buffer = torch.empty_like(_as_bytes(like))
        dist.recv(buffer, self._global(rank), group=self._group)
        return _from_bytes(buffer, like)

    def split(self, size: int) -> "DistributedGroup":
        if size == self.world_size:
            return self
        parts = consecutive_parts(self.world_size, size)
        made = [dist.new_group([self._global(rank) for rank in part]) for part in parts]
        return DistributedGroup(made[self.rank // size])

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return raw.view(like.dtype).reshape(like.shape)
