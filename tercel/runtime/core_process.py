"""The engine core in its own process: messages in, one step at a time, outputs out.

Run by EngineClient. It ends with its parent, whichever way that ends.
"""

import contextlib
import importlib
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import zmq

from tercel.config import EngineConfig
from tercel.errors import EngineError, RequestError, TercelError
from tercel.runtime.engine import Engine
from tercel.runtime.lifeline import end_with_parent
from tercel.runtime.messages import (
    Abort,
    AskStats,
    Failed,
    Failure,
    FromCore,
    Loading,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Start,
    StatsReply,
    Submit,
    ToCore,
)
from tercel.runtime.runner import OpenModel, ReportProgress, throttled

_LINGER_MS = 2000
_CHECK_MS = 500
"""How often an idle core looks whether its ranks are there."""


class Core:
    """Serves one client until it says Shutdown."""

    def __init__(self, engine: Engine, socket: "zmq.Socket[bytes]") -> None:
        self._engine = engine
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._deadline: float | None = None

    def run(self) -> None:
        send(self._socket, Ready(self._engine.limits))
        while self._deadline is None or self._is_draining():
            if not self._engine.has_work and self._deadline is None:
                self._socket.poll(_CHECK_MS)
                self._engine.check()
            while self._socket.poll(0):
                self._handle(self._decoder.decode(self._socket.recv()))
            if outputs := self._engine.step():
                send(self._socket, Outputs(outputs))
        send(self._socket, Outputs(self._engine.abort_all()))

    def _is_draining(self) -> bool:
        return self._engine.has_work and time.monotonic() < (self._deadline or 0)

    def _handle(self, message: ToCore) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                if last := self._engine.abort(request_id):
                    send(self._socket, Outputs([last]))
            case AskStats():
                send(self._socket, StatsReply(self._engine.stats()))
            case Shutdown(drain_s):
                self._deadline = time.monotonic() + drain_s

    def _submit(self, message: Submit) -> None:
        try:
            if self._deadline is not None:
                raise EngineError("the engine is shutting down; send the request to another one")
            self._engine.add_request(message.request_id, message.prompt_ids, message.params)
        except (RequestError, EngineError) as error:
            send(self._socket, Refused(message.request_id, Failure.of(error)))


def send(socket: "zmq.Socket[bytes]", message: FromCore) -> None:
    socket.send(msgspec.msgpack.encode(message))


def main() -> None:
    """Reads Start from standard input, which then stays open as long as the parent lives."""
    # The terminal sends Ctrl-C to the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    directory = Path(start.endpoint.removeprefix("ipc://")).parent
    cleanup = partial(shutil.rmtree, directory, ignore_errors=True)
    threading.Thread(target=end_with_parent, args=(cleanup,), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(start.endpoint)
    try:
        _serve(start, socket)
        code = 0
    except Exception as error:
        if not isinstance(error, TercelError):
            traceback.print_exc()
        send(socket, Failed(Failure.of(error)))
        code = 1
    socket.close(linger=_LINGER_MS)
    context.term()
    sys.exit(code)


def _serve(start: Start, socket: "zmq.Socket[bytes]") -> None:
    engine = Engine(start.config, open_model=_find(start.open_model), progress=_reporter(socket))
    with contextlib.closing(engine):
        Core(engine, socket).run()


def _find(name: str) -> Callable[[EngineConfig], OpenModel]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _reporter(socket: "zmq.Socket[bytes]") -> ReportProgress:
    return throttled(lambda *progress: send(socket, Loading(*progress)))
