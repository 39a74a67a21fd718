"""What certifying and timing do in processes of their own: check a cell, try a public kernel, time
a cell. A job is an object that travels."""

import importlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from tercel.contract.bench import bench_of, time_cell, try_peer
from tercel.contract.check import check_cell, check_replay, check_sequence
from tercel.contract.compare import Error
from tercel.contract.contract import Cell
from tercel.contract.op import Implementation, Op
from tercel.contract.receipt import CellTime, ResultError
from tercel.contract.workers import Done, run_jobs

DTYPES = (torch.bfloat16, torch.float32)
SEQUENCE_STEPS = 4


@dataclass(frozen=True)
class Subject:
    """One implementation of one op, by name, so that it travels to other processes."""

    module: str
    name: str
    implementation: str

    @classmethod
    def of(cls, op: Op[..., Any], implementation: str) -> "Subject":
        return cls(op.__module__, op.name, implementation)

    @property
    def op(self) -> Op[..., Any]:
        found: Op[..., Any] = getattr(importlib.import_module(self.module), self.name)
        return found

    def cells(self) -> tuple[Cell, ...]:
        """Of the contract and of the bench, each once."""
        every = (*self.op.contract.cells, *bench_of(self.op).every_cell)
        return tuple({str(cell): cell for cell in every}.values())

    def __str__(self) -> str:
        return f"{self.name} {self.implementation}"


@dataclass(frozen=True)
class CheckJob:
    """One cell of a subject to check."""

    subject: Subject
    cell: Cell
    device: str = "cuda"

    def run(self) -> dict[str, ResultError]:
        """The errors in bf16, after every check; cells of the bench alone, which are large, are not
        checked in fp32. Raises CheckFailed."""
        op, name, cell, where = self.subject.op, self.subject.implementation, self.cell, self.device
        if str(cell) in map(str, bench_of(op).long):
            report = check_cell(_against_portable(op), cell, name, dtype=DTYPES[0], device=where)
            return {result: _rounded(error) for result, error in report.errors.items()}
        is_small = str(cell) in map(str, op.contract.cells)
        dtypes = DTYPES if is_small else DTYPES[:1]
        reports = [check_cell(op, cell, name, dtype=dtype, device=where) for dtype in dtypes]
        if op.contract.written:
            for dtype in dtypes:
                check_sequence(op, cell, name, steps=SEQUENCE_STEPS, dtype=dtype, device=where)
        check_replay(op, cell, name, dtype=DTYPES[0], device=where)
        return {result: _rounded(error) for result, error in reports[0].errors.items()}


@dataclass(frozen=True)
class PeerJob:
    """One public kernel to try at one cell: it may compile for long, refuse, or end its process."""

    subject: Subject
    cell: Cell
    peer: str
    device: str = "cuda"

    def run(self) -> bool:
        try_peer(self.subject.op, self.cell, self.peer, device=self.device)
        return True


@dataclass(frozen=True)
class TimeJob:
    """One cell of a subject to time beside its baselines and the peers that were tried."""

    subject: Subject
    cell: Cell
    device: str = "cuda"
    peers: tuple[str, ...] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Other peers, and why they are not timed."""

    def run(self) -> CellTime:
        op, name = self.subject.op, self.subject.implementation
        options: dict[str, Any] = {"peers": self.peers, "not_run": self.not_run}
        return time_cell(op, self.cell, name, device=self.device, **options)

    def with_peers(self, problems: Mapping[str, str | None]) -> "TimeJob":
        """With those that were tried without a problem, in the order of the bench."""
        names = [peer for peer in bench_of(self.subject.op).peers if peer in problems]
        failed = {name: why for name in names if (why := problems[name]) is not None}
        running = tuple(name for name in names if name not in failed)
        return replace(self, peers=running, not_run=failed)

    def without_peers(self, problem: str) -> "TimeJob":
        spoiled = dict.fromkeys(self.peers, f"failed beside this kernel: {problem}")
        return replace(self, peers=(), not_run={**self.not_run, **spoiled})


Job = TypeVar("Job", CheckJob, PeerJob, TimeJob)


def run_job(job: CheckJob | PeerJob | TimeJob) -> Any:
    return job.run()


def ends(jobs: Sequence[Job], processes: int, deadline: float) -> Iterator[Done[Job, Any]]:
    """Jobs that lacked memory run again with the device to themselves, and those that failed beside
    peers without them."""
    again: list[Job] = []
    for done in run_jobs(run_job, jobs, processes=processes, deadline=deadline):
        job, in_time = done.job, time.monotonic() < deadline
        if isinstance(job, TimeJob) and job.peers and done.problem and in_time:
            again.append(job.without_peers(done.problem))
        elif done.lacked_memory and processes > 1:
            again.append(job)
        else:
            yield done
    yield from run_jobs(run_job, again, processes=1, deadline=deadline)


def with_peers(jobs: Sequence[TimeJob], processes: int, deadline: float) -> list[TimeJob]:
    """The jobs with the peers that run at their cells. Each is tried in a process of its own first,
    so that one that ends its process costs its own line only."""
    tries = {
        (job.subject.name, str(job.cell), peer): PeerJob(job.subject, job.cell, peer, job.device)
        for job in jobs
        for peer in bench_of(job.subject.op).peers
    }
    problems: dict[tuple[str, str], dict[str, str | None]] = defaultdict(dict)
    for done in ends(_in_turn(tries.values()), processes, deadline):
        tried = done.job
        problems[tried.subject.name, str(tried.cell)][tried.peer] = done.problem
    return [job.with_peers(problems[job.subject.name, str(job.cell)]) for job in jobs]


def _in_turn(jobs: Iterable[PeerJob]) -> list[PeerJob]:
    """One cell of every peer, then the next of each: one that compiles for long holds up few."""
    ordered: list[tuple[int, PeerJob]] = []
    seen: Counter[tuple[str, str]] = Counter()
    for job in jobs:
        ordered.append((seen[job.subject.name, job.peer], job))
        seen[job.subject.name, job.peer] += 1
    return [job for _, job in sorted(ordered, key=lambda each: each[0])]


def _against_portable(op: Op[..., Any]) -> Op[..., Any]:
    """The op with its portable form, which the other cells hold to the reference, as reference."""
    others = [each for each in op.implementations.values() if each.name != "reference"]
    truth = Implementation("reference", op.portable.run)
    return Op(op.__wrapped__, op.contract, (truth, *others))


def _rounded(error: Error) -> ResultError:
    return ResultError(
        round(error.element_ulps, 4),
        round(error.element_allowed, 4),
        round(error.rms_ulps, 4),
        round(error.rms_allowed, 4),
    )
