"""Ranks as processes, over torch.distributed (gloo on hosts, NCCL on GPUs)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tercel.errors import ExchangeError
from tercel.parallel.exchange import ExchangeGroup, consecutive_parts


class DistributedGroup(ExchangeGroup):
    """A torch.distributed process group. Bytes travel as uint8: gloo carries no fp8."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        is_nccl = dist.get_backend(process_group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else None
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        source = self._as_bytes(x)
        parts = [torch.empty_like(source) for _ in range(self.world_size)]
        with _exchange(self.rank):
            dist.all_gather(parts, source, group=self._group)
        return [_from_bytes(part, x) for part in parts]

    def all_to_all(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent = [self._as_bytes(chunk) for chunk in chunks]
        received = [torch.empty_like(chunk) for chunk in sent]
        received[self.rank].copy_(sent[self.rank])
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        pairs = [
            dist.P2POp(call, chunk, self._global(peer), self._group)
            for peer in peers
            for call, chunk in ((dist.isend, sent[peer]), (dist.irecv, received[peer]))
        ]
        with _exchange(self.rank):
            for request in dist.batch_isend_irecv(pairs) if pairs else ():
                request.wait()
        return [_from_bytes(part, like) for part, like in zip(received, chunks, strict=True)]

    def send(self, x: torch.Tensor, rank: int) -> None:
        with _exchange(self.rank):
            dist.send(self._as_bytes(x), self._global(rank), group=self._group)

    def recv(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        buffer = torch.empty_like(self._as_bytes(like))
        with _exchange(self.rank):
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

    def _as_bytes(self, x: torch.Tensor) -> torch.Tensor:
        """Where the backend can carry it: NCCL takes no tensors of the host."""
        raw = x.contiguous().reshape(-1).view(torch.uint8)
        return raw if self._device is None else raw.to(self._device)


def _from_bytes(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return raw.view(like.dtype).reshape(like.shape).to(like.device)


@contextmanager
def _exchange(rank: int) -> Iterator[None]:
    """Errors of the backend say that a peer is late or gone, not which one."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {rank} waits for a rank that is late or gone: {error}"
        ) from error
