"""What goes wrong in a request, as OpenAI's error object and an HTTP status."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from tercel.errors import EngineError, RequestError

logger = logging.getLogger(__name__)


class UnknownModel(RequestError):
    """The request names a model that this server does not serve."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__("model", f"{model!r} is not served here; use {served!r}")


class BodyTooLarge(RequestError):
    """The body of a request is longer than this server reads."""


class NotReady(EngineError):
    """The engine is loading or has died; the message is the reason."""


class RequestFailed(EngineError):
    """The engine gave up one request and goes on."""


def status_of(error: Exception) -> HTTPStatus:
    """The HTTP status that tells a client whose fault an error is."""
    match error:
        case UnknownModel():
            return HTTPStatus.NOT_FOUND
        case BodyTooLarge():
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        case RequestError():
            return HTTPStatus.BAD_REQUEST
        case NotReady():
            return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's error object. Only errors that Tercel raises on purpose show their message."""
    status = status_of(error)
    message, param = str(error), None
    if isinstance(error, RequestError):
        param = error.field
    elif not isinstance(error, EngineError):
        message = f"internal error ({type(error).__name__}); the server's log has the details"
    return _body(message, status, param)


def add_error_handlers(app: FastAPI) -> None:
    """Every failure, unknown paths included, answers with an error object."""
    app.add_exception_handler(RequestError, _on_error)
    app.add_exception_handler(EngineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_error)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(error), status_of(error))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = f"{request.method} {request.url.path}: {status.phrase.lower()}"
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        message += f"; this server has {', '.join(_endpoints(request.app))}"
    return JSONResponse(_body(message, status), status, headers=error.headers)


def _endpoints(app: FastAPI) -> list[str]:
    return [
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]


def _body(message: str, status: HTTPStatus, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    code = status.name.lower()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
