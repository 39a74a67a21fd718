"""The engine's side of a model on many ranks: starts them, sends them plans, notices their end.

Every rank is a process of its own, started here or by a launcher. This module holds no weights and
makes no exchange, so that whatever a rank does, it can still say what happened and end the others.
"""

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import zmq

from tercel.config import EngineConfig
from tercel.core.layout import Layout
from tercel.core.member import Member
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan
from tercel.errors import ConfigError, EngineError
from tercel.parallel.launch import local_members, member_of
from tercel.parallel.store import open_store
from tercel.runtime.messages import Failure
from tercel.runtime.rank_agreement import check_agreement, name_ranks
from tercel.runtime.rank_failure import cause, explain
from tercel.runtime.rank_messages import (
    ADDRESS,
    AskCalls,
    Calls,
    Close,
    Done,
    Failed,
    FromRank,
    Join,
    Joined,
    Load,
    Loaded,
    LoadedSome,
    Report,
    Run,
    StartRank,
)
from tercel.runtime.rank_peers import Peers
from tercel.runtime.runner import ReportProgress

_LOG = logging.getLogger(__name__)
RANK_MAIN = "tercel.runtime.rank_process:main"
_POLL_MS = 200
"""How soon a rank that died is noticed."""
_SETTLE_S = 1.0
"""Time to hear from the other ranks after one has failed, so that the cause is told from its
consequences."""
_REPORT_S = 1.0
"""How often the ranks that others wait for are named: those that have been quiet for longest, give
or take as much."""
_LINGER_MS = 2000
_EXIT_S = 5.0
"""Time for ranks to end in good order before they are killed."""
_GRACE_S = 5.0
"""How much later than the ranks themselves the engine gives up on a step."""

M = TypeVar("M", bound=FromRank)


class Ranks:
    """Runs steps on all ranks of a layout. See tercel.runtime.runner.Runner."""

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        *,
        rank_main: str = RANK_MAIN,
        progress: ReportProgress | None = None,
    ) -> None:
        """Starts the ranks that no launcher has started, and waits until all are loaded.

        Raises:
            ConfigError: the ranks disagree on what to run, or there are not as many as the layout
                has.
            TercelError: what a rank could not do, or which one is late or gone. No process of a
                rank is left then.
        """
        self._config = config
        self._layout = layout
        self._report = progress
        self._step = 0
        self._error: EngineError | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._heard = dict.fromkeys(range(layout.world_size), 0.0)
        """When each rank last said something."""
        self._loaded: dict[int, tuple[int, int]] = {}
        self._waiting = ""
        members = _members(layout)
        self._store = open_store(members[0], config.rank_deadline_s, serve=True)
        self._peers = Peers(members[0].host)
        self._store.set(ADDRESS, msgspec.json.encode(self._peers.address).decode())
        try:
            for member in members:
                start = StartRank(member, config, self._peers.address)
                self._processes[member.rank] = _spawn(rank_main, start)
            self._start()
        except BaseException:
            self._end()
            raise

    def run(self, plan: StepPlan) -> StepResult:
        """One step of all ranks; the drawn tokens come from the last pipeline stage.

        Raises:
            EngineError: a rank failed, is late or gone; all others are ended then.
        """
        self._check_usable()
        self._step += 1
        self._peers.send_all(Run(self._step, plan))
        while (done := self._answer(Done)).step != self._step:
            pass  # a step that Ctrl-C gave up
        return done.result

    def calls(self) -> Mapping[str, int]:
        """Calls so far on the rank that reports, per site, op and implementation."""
        self._check_usable()
        with contextlib.suppress(zmq.ZMQError):  # waiting for the answer finds it gone
            self._peers.send(self._layout.reporting_rank, AskCalls())
        return self._answer(Calls).counts

    def check(self) -> None:
        """Raises EngineError where a rank is gone; the others are ended then."""
        self._check_usable()
        while self._receive("between steps", timeout_ms=0) is not None:
            pass
        self._check_alive("between steps")

    def close(self) -> None:
        """Ends the ranks; may be called again. One that ends in another way is logged: no request
        is lost by it."""
        if self._error is not None:
            return
        self._error = EngineError("the ranks are closed")
        self._peers.send_all(Close())
        deadline = time.monotonic() + _EXIT_S
        for rank, process in self._processes.items():
            how = "did not end in time and is killed"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0, deadline - time.monotonic()))
                how = f"ended ({cause(code)})" if code else ""
            if how:
                _LOG.warning("rank %d %s while closing; %s", rank, how, self._peers.place(rank))
        self._end()

    def _start(self) -> None:
        reports = self._gather(Report, "while starting")
        check_agreement({rank: report.values for rank, report in reports.items()})
        self._peers.send_all(Load())
        self._gather(Loaded, "while loading")
        self._peers.send_all(Join())
        self._gather(Joined, "while forming the group")

    def _gather(self, kind: type[M], phase: str) -> dict[int, M]:
        """One message of `kind` from every rank."""
        arrived: dict[int, M] = {}
        self._waiting, reported = "", time.monotonic()
        self._heard = dict.fromkeys(self._heard, reported)
        while len(arrived) < self._layout.world_size:
            match self._receive(phase):
                case (rank, message) if isinstance(message, kind):
                    arrived[rank] = message
                case (rank, LoadedSome(done_bytes, total_bytes)):
                    self._loaded[rank] = done_bytes, total_bytes
                    self._show_progress()
            now = time.monotonic()
            missing = [rank for rank in self._heard if rank not in arrived]
            oldest = now - self._config.rank_deadline_s
            if late := [rank for rank in missing if self._heard[rank] < oldest]:
                raise self._fail(phase, late=late)
            if missing and now - reported > _REPORT_S:
                quiet_since = min(self._heard[rank] for rank in missing)
                quiet = [rank for rank in missing if self._heard[rank] < quiet_since + _REPORT_S]
                is_late = arrived or quiet_since < reported
                self._waiting = f"waiting for {name_ranks(quiet)} {phase}" if is_late else ""
                reported = now
                self._show_progress()
        return arrived

    def _answer(self, kind: type[M]) -> M:
        """The next message of `kind`, within the time of a step."""
        deadline = time.monotonic() + self._config.rank_deadline_s + _GRACE_S
        while time.monotonic() < deadline:
            match self._receive("in a step"):
                case (_, message) if isinstance(message, kind):
                    return message
        raise self._fail("in a step", late=list(self._heard))

    def _receive(self, phase: str, timeout_ms: int = _POLL_MS) -> tuple[int, FromRank] | None:
        """The next message of a rank, or None if there is none for a moment."""
        received = self._peers.receive(timeout_ms)
        if received is None:
            self._check_alive(phase)
            return None
        rank, message = received
        self._heard[rank] = time.monotonic()
        if isinstance(message, Failed):
            raise self._fail(phase, {rank: message.failure})
        return received

    def _show_progress(self) -> None:
        if self._report is not None:
            done_bytes = sum(done for done, _ in self._loaded.values())
            total_bytes = sum(total for _, total in self._loaded.values())
            self._report(done_bytes, total_bytes, self._waiting)

    def _check_usable(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_alive(self, phase: str) -> None:
        if self._deaths():
            raise self._fail(phase)

    def _deaths(self) -> dict[int, str]:
        """How ranks ended that no longer are there."""
        found = {}
        for rank in self._heard:
            code = self._processes[rank].poll() if rank in self._processes else None
            if code is not None:
                found[rank] = f"{cause(code)}; {self._peers.place(rank)}"
            elif self._peers.is_lost(rank):
                found[rank] = f"connection lost; {self._peers.place(rank)}"
        return found

    def _fail(
        self, phase: str, failures: Mapping[int, Failure] | None = None, late: Sequence[int] = ()
    ) -> Exception:
        """Ends all ranks; the error that says which of them failed first, and how."""
        heard = dict(failures or {})
        settled = time.monotonic() + _SETTLE_S
        while (left := settled - time.monotonic()) > 0 and len(heard) < len(self._heard):
            match self._peers.receive(round(1000 * left)):
                case (rank, Failed(failure)):
                    heard[rank] = failure
        deaths = {rank: how for rank, how in self._deaths().items() if rank not in heard}
        self._end()
        silent = [rank for rank in self._heard if rank not in heard]
        error = explain(phase, failures=heard, deaths=deaths, late=late, silent=silent)
        self._error = error if isinstance(error, EngineError) else EngineError(str(error))
        return error

    def _end(self) -> None:
        """Kills what was started here; a rank that was not ends with its connection."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._peers.close(_LINGER_MS)


def _members(layout: Layout) -> list[Member]:
    """The ranks to start: all of them, or under a launcher the one that is this process's."""
    member = member_of(layout)
    if member is None:
        return local_members(layout.world_size)
    if member.rank != 0:
        raise ConfigError(
            f"this process is rank {member.rank}, and an engine runs with rank 0; start the other "
            "ranks by the same tercel command, or call tercel.runtime.rank_process.run_rank"
        )
    return [member]


def _spawn(rank_main: str, start: StartRank) -> "subprocess.Popen[bytes]":
    """A rank, with the import path of this process and a session of its own: signals of the
    terminal are for the engine."""
    module, _, function = rank_main.partition(":")
    command = (
        f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function} as main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which is noticed later
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
    return process
