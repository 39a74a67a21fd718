"""The engine's side of a model on many ranks: starts them, sends them plans, notices their end.

Every rank is a process of its own, started here or by a launcher. This module holds no weights and
makes no exchange, so that whatever a rank does, it can still say what happened and end the others.
"""

import contextlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from socket import gethostbyname
from typing import TypeVar

import msgspec
import zmq

from tercel.config import EngineConfig
from tercel.core.layout import Layout
from tercel.core.member import Member
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan
from tercel.errors import ConfigError, EngineError, ExchangeError
from tercel.parallel.launch import local_members, member_of
from tercel.parallel.store import open_store
from tercel.runtime.messages import Failure
from tercel.runtime.rank_agreement import check_agreement, name_ranks
from tercel.runtime.rank_messages import (
    ADDRESS,
    Address,
    AskCalls,
    Calls,
    Close,
    Done,
    Failed,
    FromRank,
    Hello,
    Join,
    Joined,
    Load,
    Loaded,
    LoadedSome,
    Ping,
    Report,
    Run,
    StartRank,
    ToRank,
)
from tercel.runtime.runner import ReportProgress

RANK_MAIN = "tercel.runtime.rank_process:main"
_POLL_MS = 200
"""How soon a rank that died is noticed."""
_HEARTBEAT_MS = 5000
"""How often a connection to another host is tried; four tries fail before it counts as lost."""
_SETTLE_S = 1.0
"""Time to hear from the other ranks after one has failed, so that the cause is told from its
consequences."""
_REPORT_S = 1.0
"""How often ranks that others wait for are named."""
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
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._hosts: dict[int, str] = {}
        self._heard = dict.fromkeys(range(layout.world_size), time.monotonic())
        self._loaded: dict[int, tuple[int, int]] = {}
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        members = _members(layout)
        self._store = open_store(members[0], config.rank_deadline_s, serve=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _listen(self._context, members[0].host)
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._address = Address(endpoint, secrets.token_hex(16))
        self._store.set(ADDRESS, msgspec.json.encode(self._address).decode())
        try:
            for member in members:
                start = StartRank(member, config, self._address)
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
        self._send_all(Run(self._step, plan))
        deadline = time.monotonic() + self._config.rank_deadline_s + _GRACE_S
        while True:
            match self._receive("in a step"):
                case (_, Done(step, result)) if step == self._step:
                    return result
            if time.monotonic() > deadline:
                raise self._fail("in a step", late=list(self._heard))

    def calls(self) -> Mapping[str, int]:
        """Calls so far on the rank that reports, per site, op and implementation."""
        self._check_usable()
        self._send(self._layout.reporting_rank, AskCalls())
        while True:
            match self._receive("in a step"):
                case (_, Calls(counts)):
                    return counts

    def check(self) -> None:
        """Raises EngineError where a rank is gone; the others are ended then."""
        self._check_usable()
        while self._socket.poll(0):
            self._receive("between steps")
        self._check_alive("between steps")

    def close(self) -> None:
        """Ends the ranks; may be called again."""
        if self._error is not None:
            return
        self._error = EngineError("the ranks are closed")
        with contextlib.suppress(zmq.ZMQError):
            for rank in self._identities:
                self._send(rank, Close())
        deadline = time.monotonic() + _EXIT_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, deadline - time.monotonic()))
        self._end()

    def _start(self) -> None:
        reports = self._gather(Report, "while starting")
        check_agreement({rank: report.values for rank, report in reports.items()})
        self._send_all(Load())
        self._gather(Loaded, "while loading")
        self._send_all(Join())
        self._gather(Joined, "while forming the group")

    def _gather(self, kind: type[M], phase: str) -> dict[int, M]:
        """One message of `kind` from every rank."""
        arrived: dict[int, M] = {}
        reported = time.monotonic()
        self._heard = dict.fromkeys(self._heard, reported)
        while len(arrived) < self._layout.world_size:
            match self._receive(phase):
                case (rank, message) if isinstance(message, kind):
                    arrived[rank] = message
                case (rank, LoadedSome(done_bytes, total_bytes)):
                    self._loaded[rank] = done_bytes, total_bytes
                    self._show_progress()
            now, missing = time.monotonic(), [rank for rank in self._heard if rank not in arrived]
            silent = [
                rank for rank in missing if now - self._heard[rank] > self._config.rank_deadline_s
            ]
            if silent:
                raise self._fail(phase, late=silent)
            if arrived and missing and now - reported > _REPORT_S:
                reported = now
                self._show_progress(f"waiting for {name_ranks(missing)} {phase}")
        return arrived

    def _show_progress(self, waiting: str = "") -> None:
        if self._report is not None:
            done_bytes = sum(done for done, _ in self._loaded.values())
            self._report(done_bytes, sum(total for _, total in self._loaded.values()), waiting)

    def _receive(self, phase: str) -> tuple[int, FromRank] | None:
        """The next message of a rank, or None if there is none for a moment."""
        if not self._socket.poll(_POLL_MS):
            self._check_alive(phase)
            return None
        identity, payload = self._socket.recv_multipart()
        if identity not in self._ranks:
            self._welcome(identity, payload)
            return None
        rank, message = self._ranks[identity], self._decoder.decode(payload)
        self._heard[rank] = time.monotonic()
        if isinstance(message, Failed):
            raise self._fail(phase, {rank: message.failure})
        return rank, message

    def _welcome(self, identity: bytes, payload: bytes) -> None:
        """A rank's first word; what others may send to an open port is ignored."""
        with contextlib.suppress(msgspec.MsgspecError):
            hello = msgspec.msgpack.decode(payload, type=Hello)
            token = hello.token.encode()
            if secrets.compare_digest(token, self._address.token.encode()):
                self._identities[hello.rank] = identity
                self._ranks[identity] = hello.rank
                self._hosts[hello.rank] = f"{hello.host}, process {hello.pid}"
                self._heard[hello.rank] = time.monotonic()

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
            where = self._hosts.get(rank, "not connected yet")
            if code is not None:
                found[rank] = f"{_cause(code)}; {where}"
            elif rank in self._identities and not self._is_connected(rank):
                found[rank] = f"connection lost; {where}"
        return found

    def _is_connected(self, rank: int) -> bool:
        try:
            self._send(rank, Ping())
        except zmq.ZMQError:
            return False
        return True

    def _fail(
        self, phase: str, failures: dict[int, Failure] | None = None, late: Sequence[int] = ()
    ) -> Exception:
        """Ends all ranks; the error that says which of them failed first, and how."""
        failures = dict(failures or {})
        settled = time.monotonic() + _SETTLE_S
        while (left := settled - time.monotonic()) > 0 and len(failures) < len(self._heard):
            if self._socket.poll(round(1000 * left)):
                identity, payload = self._socket.recv_multipart()
                message, rank = self._decoder.decode(payload), self._ranks.get(identity)
                if rank is not None and isinstance(message, Failed):
                    failures[rank] = message.failure
        deaths = {rank: how for rank, how in self._deaths().items() if rank not in failures}
        self._end()
        error = _explain(phase, failures, deaths, late, list(self._heard))
        self._error = error if isinstance(error, EngineError) else EngineError(str(error))
        return error

    def _send_all(self, message: ToRank) -> None:
        payload = msgspec.msgpack.encode(message)
        for identity in self._identities.values():
            with contextlib.suppress(zmq.ZMQError):  # noticed by the next _check_alive
                self._socket.send_multipart([identity, payload])

    def _send(self, rank: int, message: ToRank) -> None:
        self._socket.send_multipart([self._identities[rank], msgspec.msgpack.encode(message)])

    def _end(self) -> None:
        """Kills what was started here; a rank that was not ends with its connection."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._socket.close(linger=_LINGER_MS)
        self._context.term()


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


def _listen(context: "zmq.Context[zmq.Socket[bytes]]", host: str) -> "zmq.Socket[bytes]":
    """A socket on a free port of the address at which ranks find the engine."""
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.linger = 0  # for whoever forgets to close
    socket.router_mandatory = True
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, 4 * _HEARTBEAT_MS
    try:
        socket.bind(f"tcp://{gethostbyname(host)}:*")
    except (OSError, zmq.ZMQError) as error:
        socket.close(linger=0)
        raise ConfigError(
            f"the engine cannot listen on {host}, where the ranks look for it: {error}; start rank "
            "0 on that host, or set MASTER_ADDR to an address of this one"
        ) from error
    return socket


def _spawn(rank_main: str, start: StartRank) -> "subprocess.Popen[bytes]":
    """A rank, with the import path of this process."""
    module, _, function = rank_main.partition(":")
    command = (
        f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function} as main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(start) + b"\n")
    process.stdin.flush()
    return process


def _explain(
    phase: str,
    failures: Mapping[int, Failure],
    deaths: Mapping[int, str],
    late: Sequence[int],
    ranks: Sequence[int],
) -> Exception:
    """The first cause: a death, then an error of a rank's own, then who kept the others waiting."""
    if deaths:
        told = "; ".join(f"rank {rank} ended ({how})" for rank, how in sorted(deaths.items()))
        return EngineError(f"{told} {phase}; the group is stopped, start it again")
    own = {rank: f for rank, f in failures.items() if f.kind != ExchangeError.__name__}
    if own:
        first = own[min(own)]
        alike = [rank for rank, failure in own.items() if failure.message == first.message]
        message = f"{name_ranks(alike)}: {first.message}"
        return msgspec.structs.replace(first, message=message).error()
    waited = sorted(failures)
    late = late or [rank for rank in ranks if rank not in failures]
    if late:
        others = f" while {name_ranks(waited)} waited" if waited else ""
        return EngineError(
            f"{name_ranks(late)} made no progress in time {phase}{others}; the group is stopped: "
            "look at what keeps them, or raise rank_deadline_s"
        )
    return EngineError(f"{name_ranks(waited)}: {failures[waited[0]].message}")


def _cause(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
