"""Runs the server: the port first, then the model, then requests, then an orderly end."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from tercel.errors import ConfigError
from tercel.server.app import create_app
from tercel.server.service import Service

logger = logging.getLogger(__name__)

_GRACE_S = 2
"""Seconds in which aborted requests may write their last words."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address; port 0 takes a free one.

    Raises:
        ConfigError: the address is in use, unknown or not allowed.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host={host!r} is no address of this machine: {error}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{host}:{port} is in use; stop the other server or choose another --port"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def run(
    service: Service,
    listener: socket.socket,
    *,
    shutdown_s: float,
    on_ready: Callable[[], None],
) -> signal.Signals | None:
    """Serves until a signal, which it returns, or until the engine dies. The engine is closed on
    every way out. One that dies after the signal is an error if requests are lost by it, and else
    a warning: all that was asked for has been done.

    Args:
        shutdown_s: seconds that running requests have to finish before they are cancelled.
        on_ready: called once the model is loaded.

    Raises:
        TercelError: the model cannot be loaded, or the engine died; running requests ended with
            that error.
    """
    config = uvicorn.Config(
        create_app(service),
        log_level="warning",
        lifespan="off",
        # Ends connections whose client does not read; _Server's deadline comes first.
        timeout_graceful_shutdown=max(1, round(shutdown_s)) + _GRACE_S,
    )
    return asyncio.run(_serve(service, _Server(config, service, shutdown_s), listener, on_ready))


async def _serve(
    service: Service, server: "_Server", listener: socket.socket, on_ready: Callable[[], None]
) -> signal.Signals | None:
    is_started = False

    async def live() -> None:
        nonlocal is_started
        try:
            await service.start()
            is_started = True
            on_ready()
            await service.engine.lost()
        finally:
            server.should_exit = True

    engine = asyncio.create_task(live())
    try:
        await server.serve(sockets=[listener])
    finally:
        if is_started:
            await service.abort_all()
            await service.engine.close()
        else:  # a start that fails or is cancelled closes the engine itself
            engine.cancel()
        await asyncio.wait([engine])
    if not engine.cancelled() and (error := engine.exception()):
        if server.ended_by is None or service.has_lost_requests:
            raise error
        logger.warning("%s (while shutting down; no request was lost)", error)
    return server.ended_by


class _Server(uvicorn.Server):
    """A server whose caller, not the default handler, acts on the signal that ended it."""

    def __init__(self, config: uvicorn.Config, service: Service, shutdown_s: float) -> None:
        super().__init__(config)
        self.ended_by: signal.Signals | None = None
        self._service = service
        self._shutdown_s = shutdown_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting and waits; what still runs at the deadline ends with an error."""
        deadline = asyncio.create_task(self._abort_at_deadline())
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends in good order, the second at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.ended_by = signal.Signals(sig)

    async def _abort_at_deadline(self) -> None:
        await asyncio.sleep(self._shutdown_s)
        logger.warning("requests still run after %g s and are cancelled", self._shutdown_s)
        await self._service.abort_all()
