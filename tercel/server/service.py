"""What the endpoints share: the engine client, the tokenizer, the metrics, and whether all is well.

The engine runs in another process; here is only what the server asks of its client.
"""

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from tercel.config import SamplingParams
from tercel.errors import EngineError, RequestError
from tercel.runtime.metrics import Stats
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.tokenizer import Tokenizer
from tercel.server.errors import NotReady, UnknownModel

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The engine client of tercel.runtime.process."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens; known once started."""

    async def start(self) -> None: ...
    def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]: ...
    async def abort(self, request_id: str) -> None: ...
    async def stats(self) -> Stats: ...
    async def close(self) -> None: ...


@dataclass
class Service:
    """One served model. Not ready until `start` returns."""

    engine: Engine
    tokenizer: Tokenizer
    model: str
    unready: str | None = "the model is loading"
    """Why requests are refused; None: they are not."""
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

    async def abort_all(self) -> None:
        """Ends every running request with an error."""
        for request_id in tuple(self._running):
            await self.engine.abort(request_id)

    def check_model(self, model: str | None) -> None:
        """Refuses another model's name, and everything while the engine is not ready."""
        if self.unready is not None:
            raise NotReady(self.unready)
        if model not in (None, self.model):
            raise UnknownModel(model, self.model)

    def output_limit(self, name: str, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens to generate at most; all that the context has left where the request is silent.

        Args:
            name: the request field that holds the prompt.

        Raises:
            RequestError: prompt and output do not fit the context.
        """
        limit = self.engine.max_model_len
        left = limit - num_prompt_tokens
        if left < 1:
            raise RequestError(
                name,
                f"{num_prompt_tokens} prompt tokens leave no room for an answer in the maximum "
                f"context length of {limit} tokens; shorten it",
            )
        if max_tokens is not None and max_tokens > left:
            raise RequestError(
                "max_tokens",
                f"{max_tokens} and {num_prompt_tokens} prompt tokens exceed the maximum context "
                f"length of {limit} tokens; use at most {left}",
            )
        return left if max_tokens is None else max_tokens

    def check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Refuses ids outside the vocabulary.

        Raises:
            RequestError: names the id.
        """
        size = self.tokenizer.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise RequestError(name, f"token {token_id} is outside 0 .. {size - 1}")

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        """The engine's outputs. Closing the generator early cancels the request.

        Raises:
            EngineError: the engine died, or this request failed in it.
        """
        is_finished = False
        self._running.add(request_id)
        try:
            async with aclosing(self.engine.generate(request_id, prompt_ids, params)) as outputs:
                async for output in outputs:
                    is_finished = output.finish_reason is not None
                    if output.finish_reason in ("error", "abort"):
                        raise RequestFailed(output.error or "the engine cancelled the request")
                    yield output
        except RequestFailed:
            raise
        except EngineError as error:
            self.unready = str(error)
            raise
        finally:
            self._running.discard(request_id)
            if not is_finished:
                # A cancelled task may not wait again unless it is shielded.
                with anyio.CancelScope(shield=True):
                    await self.engine.abort(request_id)


class RequestFailed(EngineError):
    """The engine gave up one request and goes on."""
