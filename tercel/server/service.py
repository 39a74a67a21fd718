"""What the endpoints share: the engine client, the tokenizer, and whether all is well."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Protocol

from tercel.config import SamplingParams
from tercel.errors import EngineError
from tercel.runtime.metrics import Stats
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.sequence import Limits
from tercel.runtime.tokenizer import Tokenizer
from tercel.server.errors import NotReady, RequestFailed, UnknownModel


class Engine(Protocol):
    """What the server asks of tercel.runtime.process.EngineClient."""

    @property
    def limits(self) -> Limits: ...
    async def start(self) -> None: ...
    def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]: ...
    async def abort(self, request_id: str) -> None: ...
    async def stats(self) -> Stats: ...
    async def lost(self) -> None: ...
    async def close(self) -> None: ...


@dataclass
class Service:
    """One served model. Not ready until `start` returns."""

    engine: Engine
    tokenizer: Tokenizer
    model: str
    unready: str | None = "the model is loading"
    """Why requests are refused; None: they are not."""
    has_lost_requests: bool = False
    """Whether the engine died while it had some."""
    created: int = field(default_factory=lambda: int(time.time()))
    _running: set[str] = field(default_factory=set)

    async def start(self) -> None:
        """Loads the model; every error of the engine's start is the caller's."""
        await self.engine.start()
        self.unready = None

    async def stats(self) -> Stats:
        """The engine's own figures.

        Raises:
            NotReady: the engine is loading or has died.
        """
        if self.unready is None:
            try:
                return await self.engine.stats()
            except EngineError as error:
                self.unready = str(error)
        raise NotReady(self.unready)

    def check_model(self, model: str | None) -> None:
        """Refuses another model's name, and everything while the engine is not ready.

        Raises:
            NotReady, UnknownModel.
        """
        if self.unready is not None:
            raise NotReady(self.unready)
        if model not in (None, self.model):
            raise UnknownModel(model, self.model)

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        """The engine's outputs. Closing the generator early aborts the request.

        Raises:
            RequestError: the engine refuses the request.
            EngineError: the engine died, or gave up this request.
        """
        self._running.add(request_id)
        try:
            async with aclosing(self.engine.generate(request_id, prompt_ids, params)) as outputs:
                async for output in outputs:
                    if output.finish_reason == "abort":
                        raise NotReady("the server is shutting down and cancelled the request")
                    if output.finish_reason == "error":
                        raise RequestFailed(output.error or "the engine gave up the request")
                    yield output
        except RequestFailed:
            raise
        except EngineError as error:
            self.unready, self.has_lost_requests = str(error), True
            raise
        finally:
            self._running.discard(request_id)

    async def abort_all(self) -> None:
        """Ends every running request with an error; a dead engine has ended them already."""
        with suppress(EngineError):
            for request_id in tuple(self._running):
                await self.engine.abort(request_id)
