"""From a job to an HTTP response: collected or streamed, and cancelled with its client."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from msgspec import Struct
from starlette.requests import ClientDisconnect

from tercel.errors import TercelError
from tercel.server.errors import BodyTooLarge, error_body
from tercel.server.responses import to_json
from tercel.server.service import Service

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status of a response that nobody reads, after the field's custom."""


MAX_BODY_BYTES = 32 << 20
"""A million tokens are about 4 MB of text, or 8 MB of ids."""


class Job(Protocol):
    """A checked request: its answer in chunks, and the chunks as one answer."""

    @property
    def is_stream(self) -> bool: ...
    def chunks(self) -> AsyncGenerator[Any]: ...
    def collect(self, chunks: Sequence[Any]) -> Struct: ...


class ClientGone(Exception):
    """The client closed its connection."""


async def answer(
    request: Request, service: Service, prepare: Callable[[Service, bytes], Job]
) -> Response:
    """The response to a request. Leaves the event loop to others while it reads the request.

    Raises:
        RequestError: the body is too long, as `prepare`, or the engine refuses the request.
        EngineError: the engine failed before the first token.
    """
    try:
        body = await _body(request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    job = await asyncio.to_thread(prepare, service, body)
    chunks = job.chunks()
    try:
        if not job.is_stream:
            whole = await _unless_gone(request, _collected(chunks))
            return Response(to_json(job.collect(whole)), media_type="application/json")
        # Waiting for the first chunk gives an error before it a status of its own.
        first = await _unless_gone(request, anext(chunks))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _events(first, chunks), media_type="text/event-stream", headers=headers
    )


async def _body(request: Request) -> bytes:
    """Raises BodyTooLarge as soon as there is too much of it."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(
                "body", f"longer than {MAX_BODY_BYTES:,} bytes; send less, or several requests"
            )
    return bytes(body)


async def _collected(chunks: AsyncGenerator[T]) -> list[T]:
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


async def _events(first: Struct, chunks: AsyncGenerator[Struct]) -> AsyncIterator[bytes]:
    """Server-sent events; an error after the first chunk is one of them."""
    async with aclosing(chunks):
        yield _event(to_json(first))
        try:
            async for chunk in chunks:
                yield _event(to_json(chunk))
        except Exception as error:
            unexpected = None if isinstance(error, TercelError) else error
            logger.warning("a streamed request failed: %s", error, exc_info=unexpected)
            yield _event(JSONResponse(error_body(error)).body)
    yield _event(b"[DONE]")


def _event(data: bytes | memoryview) -> bytes:
    return b"data: %b\n\n" % bytes(data)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait((task, gone))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
