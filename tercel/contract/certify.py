"""Certifies implementations on this device: every cell checked, several at a time; then timed.

What is right is worth a receipt at once, so one is made after the checks and replaced by one with
times when those are there.
"""

import datetime
import importlib
import platform
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tercel.contract.bench import Bench, bench_of, time_cell, warm_peers
from tercel.contract.check import check_cell, check_replay, check_sequence
from tercel.contract.compare import Error
from tercel.contract.contract import Cell
from tercel.contract.op import Op
from tercel.contract.receipt import (
    Ceilings,
    CellResult,
    CellTime,
    Receipt,
    ResultError,
    content_hash,
)
from tercel.contract.workers import Done, run_jobs
from tercel.core.arch import Arch

__all__ = ["Bench", "bench_of"]

DTYPES = (torch.bfloat16, torch.float32)
SEQUENCE_STEPS = 4
CHECK_SHARE = 0.6
"""Of the time that there is; the rest is for timing."""
DRIVER = Path("/proc/driver/nvidia/version")


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
        every = (*self.op.contract.cells, *bench_of(self.op).cells)
        return tuple({str(cell): cell for cell in every}.values())

    def __str__(self) -> str:
        return f"{self.name} {self.implementation}"


@dataclass(frozen=True)
class CellJob:
    """One cell of a subject to check or to time."""

    subject: Subject
    cell: Cell
    device: str = "cuda"
    peers: bool = False


@dataclass
class Verdict:
    """What is known of a subject; complete when it has something for every cell."""

    subject: Subject
    errors: dict[str, Mapping[str, ResultError]] = field(default_factory=dict)
    times: dict[str, CellTime] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Cell to what is wrong with it."""
    unreached: int = 0
    """Cells for whose check there was no time."""
    seconds: float = 0.0
    """Since the start, when it was reported."""

    @property
    def is_right(self) -> bool:
        return not self.problems and len(self.errors) == len(self.subject.cells())

    @property
    def worst_share(self) -> float:
        """How much of a tolerance the worst result takes."""
        return max((e.share for errors in self.errors.values() for e in errors.values()), default=0)


@dataclass(frozen=True)
class Certification:
    """A run over several subjects."""

    subjects: Sequence[Subject]
    arch: Arch
    ceilings: Ceilings
    command: str = ""
    seconds: float = 600.0
    """All that it may take."""
    processes: int = 8
    """That check at the same time."""
    peers: bool = False
    device: str = "cuda"
    started: float = field(default_factory=time.monotonic)

    def check(self) -> Iterator[Verdict]:
        """A verdict per subject, as soon as all its cells are checked."""
        deadline = self.started + CHECK_SHARE * self.seconds
        jobs = [
            CellJob(subject, cell, self.device, self.peers)
            for subject in self.subjects
            for cell in subject.cells()
        ]
        verdicts = {subject: Verdict(subject) for subject in self.subjects}
        left = {subject: len(subject.cells()) for subject in self.subjects}
        for done in self._ends(check_job, jobs, self.processes, deadline):
            subject, cell = done.job.subject, str(done.job.cell)
            verdict = verdicts[subject]
            if not done.was_reached:
                verdict.unreached += 1
            elif done.result is None:
                verdict.problems[cell] = done.problem or "no result"
            else:
                verdict.errors[cell] = done.result
            left[subject] -= 1
            if left[subject] == 0:
                verdict.seconds = time.monotonic() - self.started
                yield verdict

    def time(self, verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
        """The verdicts with times, one after the other; a cell that cannot be timed has none."""
        deadline = self.started + self.seconds
        by_subject = {verdict.subject: verdict for verdict in verdicts}
        jobs = [
            CellJob(verdict.subject, cell, self.device, self.peers)
            for verdict in verdicts
            for cell in bench_of(verdict.subject.op).cells
        ]
        left = defaultdict(int, {v.subject: len(bench_of(v.subject.op).cells) for v in verdicts})
        for done in self._ends(time_job, jobs, 1, deadline):
            verdict = by_subject[done.job.subject]
            if done.result is None:
                verdict.problems[str(done.job.cell)] = f"not timed: {done.problem}"
            else:
                verdict.times[str(done.job.cell)] = done.result
            left[verdict.subject] -= 1
            if left[verdict.subject] == 0:
                verdict.seconds = time.monotonic() - self.started
                yield verdict

    def _ends(
        self,
        function: Callable[[CellJob], Any],
        jobs: Sequence[CellJob],
        processes: int,
        deadline: float,
    ) -> Iterator[Done[CellJob, Any]]:
        """Jobs that lacked memory run again with the device to themselves, and those that failed
        beside peers without them."""
        again = []
        for done in run_jobs(function, jobs, processes=processes, deadline=deadline):
            retry = done.lacked_memory and processes > 1
            without_peers = function is time_job and done.job.peers and done.result is None
            if retry or (without_peers and time.monotonic() < deadline):
                again.append(replace(done.job, peers=done.job.peers and not without_peers))
            else:
                yield done
        yield from run_jobs(function, again, processes=1, deadline=deadline)

    def receipt(self, verdict: Verdict) -> Receipt:
        """Of a subject whose every cell is right."""
        subject, device = verdict.subject, torch.device(self.device)
        is_gpu = device.type == "cuda"
        return Receipt(
            op=subject.name,
            implementation=subject.implementation,
            arch=self.arch,
            world_size=1,
            content_hash=content_hash(subject.op, subject.implementation),
            ran=True,
            device=torch.cuda.get_device_name() if is_gpu else self.device,
            versions=tool_versions(),
            cells=tuple(
                CellResult(cell, verdict.errors[cell], verdict.times.get(cell))
                for cell in map(str, subject.cells())
            ),
            ceilings=self.ceilings,
            command=self.command,
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        )


def check_job(job: CellJob) -> dict[str, ResultError]:
    """The errors in bf16, after every check; cells of the bench alone, which are large, are not
    checked in fp32. Raises CheckFailed."""
    op, name, cell = job.subject.op, job.subject.implementation, job.cell
    kind: dict[str, Any] = {"device": job.device}
    is_small = str(cell) in {str(each) for each in op.contract.cells}
    dtypes = DTYPES if is_small else DTYPES[:1]
    reports = [check_cell(op, cell, name, dtype=dtype, **kind) for dtype in dtypes]
    if op.contract.written:
        for dtype in dtypes:
            check_sequence(op, cell, name, steps=SEQUENCE_STEPS, dtype=dtype, **kind)
    check_replay(op, cell, name, dtype=DTYPES[0], **kind)
    if job.peers and any(str(cell) == str(each) for each in bench_of(op).cells):
        warm_peers(op, cell, **kind)
    return {result: _rounded(error) for result, error in reports[0].errors.items()}


def time_job(job: CellJob) -> CellTime:
    """The cell beside its baselines, and its peers where the job has them."""
    subject = job.subject
    run = partial(time_cell, subject.op, job.cell, subject.implementation)
    return run(peers=job.peers, device=job.device)


def _rounded(error: Error) -> ResultError:
    return ResultError(
        round(error.element_ulps, 4),
        round(error.element_allowed, 4),
        round(error.rms_ulps, 4),
        round(error.rms_allowed, 4),
    )


def tool_versions() -> dict[str, str]:
    """What a receipt records of the software that it was made with."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        versions["triton"] = version("triton")
    if DRIVER.exists() and (found := re.search(r"\b\d+\.\d+\.\d+\b", DRIVER.read_text())):
        versions["driver"] = found[0]
    return versions
