"""Certifies implementations on this device: every cell checked, several at a time; then timed.

What is right is worth a receipt at once, so one is made after the checks and replaced by one with
times when those are there.
"""

import datetime
import platform
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tercel.contract.bench import Bench, bench_of
from tercel.contract.jobs import CheckJob, Subject, TimeJob, ends, with_peers
from tercel.contract.receipt import (
    Ceilings,
    CellResult,
    CellTime,
    Receipt,
    ResultError,
    content_hash,
)
from tercel.core.arch import Arch

__all__ = ["Bench", "bench_of"]

CHECK_SHARE = 0.6
"""Of the time that there is; the rest is for timing."""
PEER_SHARE = 0.5
"""Of that rest, for public kernels to compile and be tried."""
DRIVER = Path("/proc/driver/nvidia/version")


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
            CheckJob(subject, cell, self.device)
            for subject in self.subjects
            for cell in subject.cells()
        ]
        verdicts = {subject: Verdict(subject) for subject in self.subjects}
        left = {subject: len(subject.cells()) for subject in self.subjects}
        for done in ends(jobs, self.processes, deadline):
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
            TimeJob(verdict.subject, cell, self.device)
            for verdict in verdicts
            for cell in bench_of(verdict.subject.op).every_cell
        ]
        if self.peers:
            until = time.monotonic() + PEER_SHARE * (deadline - time.monotonic())
            jobs = with_peers(jobs, self.processes, until)
        left = Counter(job.subject for job in jobs)
        for done in ends(jobs, 1, deadline):
            verdict = by_subject[done.job.subject]
            if done.result is None:
                verdict.problems[str(done.job.cell)] = f"not timed: {done.problem}"
            else:
                verdict.times[str(done.job.cell)] = done.result
            left[verdict.subject] -= 1
            if left[verdict.subject] == 0:
                verdict.seconds = time.monotonic() - self.started
                yield verdict

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


def tool_versions() -> dict[str, str]:
    """What a receipt records of the software that it was made with."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        versions["triton"] = version("triton")
    if DRIVER.exists() and (found := re.search(r"\b\d+\.\d+\.\d+\b", DRIVER.read_text())):
        versions["driver"] = found[0]
    return versions
