"""The HTTP application: which path does what."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from tercel.server.answer import answer
from tercel.server.chat import ChatJob
from tercel.server.completions import CompletionJob
from tercel.server.errors import NotReady, add_error_handlers
from tercel.server.metrics import exposition
from tercel.server.service import Service


def create_app(service: Service) -> FastAPI:
    """The application of one service. It neither starts nor closes the engine."""
    app = FastAPI(title="Tercel", docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, service, ChatJob.prepare)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, service, CompletionJob.prepare)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @app.get("/health")
    async def health() -> dict[str, str]:
        await service.stats()
        return {"status": "ok", "model": service.model}

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            stats = await service.stats()
        except NotReady:
            stats = None
        return Response(exposition(service.model, stats), media_type=CONTENT_TYPE_LATEST)

    return app


def _model(service: Service) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": service.model, "object": "model", "created": service.created}
    entry["owned_by"] = "tercel"
    if service.unready is None:
        entry["max_model_len"] = service.engine.limits.max_model_len
    return entry
