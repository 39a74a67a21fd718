"""The client of an engine core that runs in a process of its own. Imports neither torch nor ops."""

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from tercel.config import EngineConfig, SamplingParams
from tercel.errors import EngineError, RequestError, TercelError
from tercel.runtime.messages import (
    Abort,
    AskStats,
    Failed,
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
from tercel.runtime.metrics import Stats
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.runner import ReportProgress
from tercel.runtime.sequence import Limits

_Outputs = asyncio.Queue[RequestOutput | Exception]
_CORE = "tercel.runtime.core_process"
_POLL_MS = 200
"""How soon a core that died is noticed."""
_EXIT_S = 5.0
"""Time for the core to end after its last request, before it is killed."""


class EngineClient:
    """Start it, generate, close it; all calls from one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        open_model: str = "tercel.runtime.checkpoint:open_checkpoint",
        progress: ReportProgress | None = None,
    ) -> None:
        """`open_model`: module:function that the core calls; see tercel.runtime.runner."""
        self._config = config
        self._open_model = open_model
        self._progress = progress
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._streams: dict[str, _Outputs | None] = {}
        """By request id; None once its reader has gone and its last output has not come yet."""
        self._stats: list[asyncio.Future[Stats]] = []
        self._error: Exception | None = EngineError("the engine is not started")
        self._failure: Exception | None = None
        self._gone = asyncio.Event()
        self._limits: Limits | None = None
        self._is_started = self._is_closing = False

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted."""
        return self._error is None

    @property
    def limits(self) -> Limits:
        """What requests have to stay within; known once started."""
        if self._limits is None:
            raise EngineError("the engine is not started")
        return self._limits

    @property
    def core_pid(self) -> int:
        """The core's process id."""
        return self._process.pid

    async def start(self) -> None:
        """Starts the core and waits until it is loaded.

        Raises:
            TercelError: why it did not load; its process has ended then.
        """
        self._directory = tempfile.mkdtemp(prefix="tercel-")
        endpoint = f"ipc://{Path(self._directory) / 'core'}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._process = await _spawn(Start(endpoint, self._config, self._open_model))
        self._listener = asyncio.create_task(self._listen())
        self._is_started = True
        try:
            ready = await self._ready
        except BaseException:
            await self.close(drain_s=0)
            raise
        shutil.rmtree(self._directory, ignore_errors=True)  # connected: nobody looks there again
        self._limits, self._error = ready.limits, None

    def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of one request. Closing the generator early aborts the request.

        Raises:
            RequestError: at once, for what the limits refuse or an id in use.
            EngineError: the core is gone, now or while iterating.
        """
        self._check_free(request_id)
        self.limits.check(prompt_ids, params)
        return self._stream(Submit(request_id, tuple(prompt_ids), params))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its generator then gives a last output with finish_reason abort."""
        if self._process.returncode is None:
            with contextlib.suppress(TercelError):  # a core that is ending ends its requests
                self._send(Abort(request_id))

    async def stats(self) -> Stats:
        """A snapshot from the core.

        Raises:
            EngineError: the core is gone.
        """
        self._check_alive()
        self._send(AskStats())
        reply: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats.append(reply)
        return await reply

    async def lost(self) -> None:
        """Waits until the core is gone.

        Raises:
            TercelError: why it ended, where `close` has not ended it, or it failed meanwhile.
        """
        await self._gone.wait()
        if self._failure is not None or not self._is_closing:
            raise self._death()

    async def close(self, drain_s: float = 10.0) -> None:
        """Lets running requests finish for `drain_s` seconds, aborts the rest, ends the core.

        May be called again, and without start.
        """
        if not self._is_started:
            return
        self._is_closing = True
        if self.is_alive:
            self._send(Shutdown(drain_s))
            self._error = EngineError("the engine is shutting down")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), drain_s + _EXIT_S)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        try:
            await asyncio.wait([self._listener])
        finally:  # a second Ctrl-C cancels the waiting
            self._socket.close(linger=0)
            self._context.term()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def __aenter__(self) -> "EngineClient":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaving by an exception, Ctrl-C included, does not wait for running requests."""
        await (self.close() if kind is None else self.close(drain_s=0))

    async def _stream(self, submit: Submit) -> AsyncGenerator[RequestOutput]:
        name, queue = submit.request_id, _Outputs()
        self._check_free(name)
        self._send(submit)
        self._streams[name] = queue
        try:
            while name in self._streams or not queue.empty():
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if name in self._streams:
                self._streams[name] = None
                await self.abort(name)

    async def _listen(self) -> None:
        """Takes the core's messages until it is gone, the last ones included."""
        try:
            while await self._socket.poll(_POLL_MS) or self._process.returncode is None:
                while await self._socket.poll(0):
                    self._handle(self._decoder.decode(await self._socket.recv()))
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Tells all who wait for the core that it is gone."""
        self._gone.set()
        self._error = self._error or self._death()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._stats]
        for future in waiting:
            if not future.done():
                future.set_exception(self._death())
        for name in tuple(self._streams):
            self._put(name, self._death(), is_last=True)

    def _handle(self, message: FromCore) -> None:
        match message:
            case Loading(done_bytes, total_bytes, waiting):
                if self._progress is not None:
                    self._progress(done_bytes, total_bytes, waiting)
            case Ready():
                self._ready.set_result(message)
            case Outputs(outputs):
                for output in outputs:
                    is_last = output.finish_reason is not None
                    self._put(output.request_id, output, is_last=is_last)
            case Refused(request_id, failure):
                self._put(request_id, failure.error(), is_last=True)
            case StatsReply(stats):
                reply = self._stats.pop(0)
                if not reply.done():
                    reply.set_result(stats)
            case Failed(failure):
                self._failure = self._error = failure.error()
                self._give_up()  # before its process is gone, which may take seconds

    def _put(self, request_id: str, item: RequestOutput | Exception, *, is_last: bool) -> None:
        queue = self._streams.pop(request_id) if is_last else self._streams[request_id]
        if queue is not None:
            queue.put_nowait(item)

    def _send(self, message: ToCore) -> None:
        # Without a high-water mark a send to a connected peer never waits.
        sent = self._socket.send(msgspec.msgpack.encode(message), zmq.DONTWAIT)
        if cast("asyncio.Future[object]", sent).exception() is not None:
            raise self._death()

    def _check_free(self, request_id: str) -> None:
        self._check_alive()
        if request_id in self._streams:
            raise RequestError("request_id", f"{request_id!r} is in use; choose another")

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    def _death(self) -> Exception:
        """What to tell those who wait for a core that is gone."""
        if self._failure is not None:
            return self._failure
        code = self._process.returncode
        cause = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return EngineError(f"the engine core ended ({cause}); restart the server")


async def _spawn(start: Start) -> asyncio.subprocess.Process:
    """The core, with the import path of this process and a session of its own."""
    command = f"import sys; sys.path[:] = {sys.path!r}; from {_CORE} import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        command,
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(start) + b"\n")
    return process
