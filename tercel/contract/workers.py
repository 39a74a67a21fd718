"""Jobs in processes of their own: one that fails, dies or hangs takes nothing else with it.

A kernel with a wild address ends its process's CUDA context, and everything that runs in it.
"""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

import torch

from tercel.errors import TercelError

Job = TypeVar("Job")
Result = TypeVar("Result")

PRELOADED = ["torch", "triton"]
"""Imported once, in the process that the workers are forked from."""
JOB_S = 150.0
"""A job that takes longer hangs."""


@dataclass(frozen=True)
class Done(Generic[Job, Result]):
    """One job's end: a result, or the problem that it ended with."""

    job: Job
    result: Result | None = None
    problem: str | None = None
    lacked_memory: bool = False
    """It may succeed with the device to itself."""
    was_reached: bool = True
    """False: there was no time for it, which says nothing about it."""


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    processes: int,
    deadline: float,
    job_s: float = JOB_S,
) -> Iterator[Done[Job, Result]]:
    """Ends of `jobs` as they come. `function` and jobs are importable and picklable; `deadline` is
    in seconds of time.monotonic, and what is not done by then, or takes longer than `job_s`, ends
    with a problem."""
    waiting = deque(jobs)
    workers = [_Worker(function, job_s) for _ in range(min(processes, len(jobs)))]
    try:
        while waiting or any(worker.job is not None for worker in workers):
            for worker in workers:
                if worker.job is None and waiting:
                    worker.start(waiting.popleft())
            busy = [worker for worker in workers if worker.job is not None]
            limit = min(deadline, *(worker.limit for worker in busy))
            ready = wait([w.pipe for w in busy], timeout=max(0.0, limit - time.monotonic()))
            for worker in busy:
                if worker.pipe in ready:
                    yield worker.finish()
                elif time.monotonic() >= deadline:
                    yield _unreached(worker.give_up())
                elif time.monotonic() >= worker.limit:
                    yield Done(worker.give_up(), problem=f"did not end within {job_s:.0f} s")
            if time.monotonic() >= deadline:
                yield from map(_unreached, waiting)
                waiting.clear()
    finally:
        for worker in workers:
            worker.stop()


def _unreached(job: Job) -> Done[Job, Result]:
    return Done(job, problem="no time was left", was_reached=False)


class _Worker(Generic[Job, Result]):
    """A process that runs jobs one after the other; it is started anew after an unknown error."""

    def __init__(self, function: Callable[[Job], Result], job_s: float) -> None:
        self._function = function
        self._job_s = job_s
        self._process: BaseProcess | None = None
        self.pipe: Connection
        self.job: Job | None = None
        self.limit = 0.0

    def start(self, job: Job) -> None:
        if self._process is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            self.pipe, theirs = context.Pipe()
            self._process = context.Process(
                target=_serve, args=(self._function, theirs), daemon=True
            )
            self._process.start()
            theirs.close()
        self.job, self.limit = job, time.monotonic() + self._job_s
        self.pipe.send(job)

    def finish(self) -> Done[Job, Result]:
        """What the process has sent, or that it died."""
        assert self.job is not None and self._process is not None
        job, self.job = self.job, None
        try:
            done, is_usable = self.pipe.recv()
        except EOFError:
            self._process.join()
            done, is_usable = Done(job, problem=f"died with {self._process.exitcode}"), False
        if not is_usable:
            self.stop()
        return done  # type: ignore[no-any-return]

    def give_up(self) -> Job:
        """The job, whose process is ended."""
        assert self.job is not None
        job, self.job = self.job, None
        self.stop()
        return job

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.pipe.close()
            self._process = None


def _serve(function: Callable[[Job], Result], pipe: Connection) -> None:
    """The life of a worker process; it ends with its parent."""
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        is_usable = True
        try:
            done: Done[Job, Result] = Done(job, function(job))
        except TercelError as error:
            done = Done(job, problem=str(error))
        except torch.OutOfMemoryError as error:
            done = Done(job, problem=str(error).splitlines()[0], lacked_memory=True)
        except Exception as error:
            # Whatever it was, the device's context may be broken.
            done, is_usable = Done(job, problem=f"{type(error).__name__}: {error}"), False
        if torch.cuda.is_available() and is_usable:
            torch.cuda.empty_cache()
        pipe.send((done, is_usable))
