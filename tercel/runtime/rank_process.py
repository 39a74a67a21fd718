"""A rank in a process of its own: agrees with the others, loads its part, runs the plans it gets.

It decides nothing: one scheduler, in the engine's process, sends every rank the same plan.
"""

import contextlib
import os
import platform
import signal
import sys
import threading
import traceback
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
import zmq
from torch._C._distributed_c10d import PrefixStore, Store
from zmq.utils.monitor import recv_monitor_message

from tercel.config import EngineConfig
from tercel.core.group import Groups
from tercel.core.member import Member
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan
from tercel.errors import EngineError, TercelError
from tercel.parallel.distributed import DistributedGroup
from tercel.parallel.store import open_store, wait_for
from tercel.runtime.checkpoint import Opened, load_weights, open_files, start_rank
from tercel.runtime.lifeline import end_with_parent
from tercel.runtime.messages import Failure
from tercel.runtime.model_runner import ModelRunner
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
from tercel.runtime.rank_report import report_of
from tercel.runtime.runner import throttled

_LINGER_MS = 2000
_HEARTBEAT_MS = 5000


def main() -> None:
    """For ranks started by the engine: reads StartRank from standard input, which then stays open
    as long as the engine lives."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartRank)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.exit(run_rank(start.config, start.member, start.address))


def run_rank(config: EngineConfig, member: Member, address: Address | None = None) -> int:
    """Serves the engine of the group until it says Close; the process's exit code. Without an
    address the engine's is looked up in the store."""
    # Whoever stops the group signals the engine, which lets requests finish and then says Close.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    store = open_store(member, config.rank_deadline_s)
    address = address or msgspec.json.decode(wait_for(store, ADDRESS), type=Address)
    context = zmq.Context()
    socket = _connect(context, address.endpoint)
    _send(socket, Hello(member.rank, address.token, platform.node(), os.getpid()))
    try:
        _Rank(config, member, store, socket).run()
        code = 0
    except Exception as error:
        if not isinstance(error, TercelError):
            traceback.print_exc()
        _send(socket, Failed(Failure.of(error)))
        code = 1
    socket.disable_monitor()
    socket.close(linger=_LINGER_MS)
    context.term()
    return code


class _Rank:
    """One rank from its first word to its last."""

    def __init__(
        self, config: EngineConfig, member: Member, store: Store, socket: "zmq.Socket[bytes]"
    ) -> None:
        self._config = config
        self._member = member
        self._store = store
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ToRank)

    def run(self) -> None:
        member = self._member
        opened = open_files(
            self._config, local_rank=member.local_rank, local_size=member.local_size
        )
        if opened.device.type == "cuda":
            torch.cuda.set_device(opened.device)
        plan = opened.plan(member.rank)
        _send(self._socket, Report(report_of(opened, plan)))
        if not isinstance(self._receive(), Load):
            return
        weights = load_weights(opened, plan, throttled(self._report))
        _send(self._socket, Loaded())
        if not isinstance(self._receive(), Join):
            return
        groups = Groups.of(self._join(opened), plan.place.layout)
        runner = start_rank(opened, plan, weights, groups)
        del weights
        _send(self._socket, Joined())
        self._serve(runner, reports=member.rank == plan.place.layout.reporting_rank)
        dist.destroy_process_group()

    def _join(self, opened: Opened) -> DistributedGroup:
        """The group of all ranks; an exchange that a rank does not answer in time is an error."""
        is_cuda = opened.device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=PrefixStore("ranks", self._store),
            rank=self._member.rank,
            world_size=self._member.world_size,
            timeout=timedelta(seconds=self._config.rank_deadline_s),
            device_id=opened.device if is_cuda else None,
        )
        return DistributedGroup()

    def _serve(self, runner: ModelRunner, *, reports: bool) -> None:
        while True:
            match self._receive():
                case Run(step, plan):
                    result = _run(runner, plan, step)
                    if reports:
                        _send(self._socket, Done(step, result))
                case AskCalls():
                    _send(self._socket, Calls(dict(runner.calls())))
                case _:
                    return

    def _receive(self) -> ToRank:
        """The engine's next word. After Close it may leave."""
        while isinstance(message := self._decoder.decode(self._socket.recv()), Ping):
            pass
        if isinstance(message, Close):
            self._socket.disable_monitor()
        return message

    def _report(self, done_bytes: int, total_bytes: int, waiting: str = "") -> None:
        _send(self._socket, LoadedSome(done_bytes, total_bytes))


def _run(runner: ModelRunner, plan: StepPlan, step: int) -> StepResult:
    try:
        return runner.run(plan)
    except TercelError:
        raise
    except Exception as error:
        raise EngineError(f"step {step} failed: {type(error).__name__}: {error}") from error


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    """A socket to the engine, which ends this process should the engine be gone."""
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, 4 * _HEARTBEAT_MS
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
    threading.Thread(target=_end_with_engine, args=(monitor,), daemon=True).start()
    socket.connect(endpoint)
    return socket


def _end_with_engine(monitor: "zmq.Socket[bytes]") -> None:
    with contextlib.suppress(zmq.ContextTerminated):  # this process ends by itself
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
            os._exit(1)
    monitor.close(linger=0)


def _send(socket: "zmq.Socket[bytes]", message: FromRank) -> None:
    socket.send(msgspec.msgpack.encode(message))
