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


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 takes a free one.

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
    """Serves until a signal; returns it. The engine is closed on every way out.

    Args:
        shutdown_s: seconds that running requests have to finish before they are cancelled.
        on_ready: called once the model is loaded.

    Raises:
        TercelError: the model cannot be loaded.
    """
    config = uvicorn.Config(
        create_app(service),
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(shutdown_s)),
    )
    return asyncio.run(_serve(service, _Server(config), listener, on_ready))


async def _serve(
    service: Service, server: "_Server", listener: socket.socket, on_ready: Callable[[], None]
) -> signal.Signals | None:
    async def start() -> None:
        try:
            await service.start()
        except BaseException:
            server.should_exit = True
            raise
        on_ready()

    loading = asyncio.create_task(start())
    try:
        await server.serve(sockets=[listener])
    finally:
        loading.cancel()
        await asyncio.wait([loading])
        await service.engine.close()
    if not loading.cancelled() and (error := loading.exception()):
        raise error
    return server.signal


class _Server(uvicorn.Server):
    """A server whose caller, not the default handler, acts on the signal that ended it."""

    signal: signal.Signals | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends in good order, the second at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.signal = signal.Signals(sig)
