"""Ranks as threads of one process: any world size on any machine, sixteen in a unit test."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tercel.errors import ExchangeError
from tercel.parallel.exchange import ExchangeGroup, consecutive_parts

T = TypeVar("T")


class _Mailboxes:
    """One queue per pair of ranks, so that messages between two ranks keep their order."""

    def __init__(self, world_size: int, deadline_s: float) -> None:
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.closed = threading.Event()
        self._boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (source, target): queue.Queue()
            for source in range(world_size)
            for target in range(world_size)
        }

    def put(self, x: torch.Tensor, source: int, target: int) -> None:
        self._boxes[source, target].put(x)

    def get(self, source: int, target: int) -> torch.Tensor:
        box = self._boxes[source, target]
        waited = 0.0
        while not self.closed.is_set():
            try:
                return box.get(timeout=0.05)
            except queue.Empty:
                waited += 0.05
                if waited >= self.deadline_s:
                    raise ExchangeError(
                        f"rank {target} waited {self.deadline_s:g} s for rank {source}"
                    ) from None
        raise ExchangeError(f"rank {target} waits for rank {source}, but another rank has failed")


class ThreadGroup(ExchangeGroup):
    """One rank's end of a group of threads. Tensors are copied, never shared."""

    def __init__(self, rank: int, mailboxes: _Mailboxes, ranks: range | None = None) -> None:
        """`ranks`: those of the mailboxes that belong to the group; None: all."""
        self._ranks = range(mailboxes.world_size) if ranks is None else ranks
        self.rank = rank
        self.world_size = len(self._ranks)
        self._mail = mailboxes

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self.all_to_all([x] * self.world_size)

    def all_to_all(self, chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for target, chunk in enumerate(chunks):
            self.send(chunk, target)
        return [self._mail.get(source, self._ranks[self.rank]) for source in self._ranks]

    def send(self, x: torch.Tensor, rank: int) -> None:
        self._mail.put(x.clone(), self._ranks[self.rank], self._ranks[rank])

    def recv(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        return self._mail.get(self._ranks[rank], self._ranks[self.rank])

    def split(self, size: int) -> "ThreadGroup":
        part = consecutive_parts(self.world_size, size)[self.rank // size]
        return ThreadGroup(self.rank % size, self._mail, self._ranks[part.start : part.stop])


def run_threads(
    world_size: int, body: Callable[[ThreadGroup], T], *, deadline_s: float = 60.0
) -> list[T]:
    """Runs `body` once per rank; returns their results in rank order, or raises the first failure
    after every thread has ended."""
    mail = _Mailboxes(world_size, deadline_s)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadGroup(rank, mail))
        except BaseException as error:
            failures.append(error)
            mail.closed.set()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world_size)]
