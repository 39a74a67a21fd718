"""Clients of the application in this process: no socket, no engine process."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import openai

from tercel.server.app import create_app
from tercel.server.service import Service
from tests.server.fakes import TOKENIZER, FakeEngine


def service_of(engine: FakeEngine) -> Service:
    """A service that is ready."""
    return Service(engine, TOKENIZER, "nano", unready=None)


@asynccontextmanager
async def http_client(service: Service) -> AsyncGenerator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://nano") as client:
        yield client


@asynccontextmanager
async def openai_client(service: Service) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with http_client(service) as http:
        yield openai.AsyncOpenAI(
            api_key="none", base_url="http://nano/v1", http_client=http, max_retries=0
        )
