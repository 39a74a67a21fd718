"""/v1/completions: raw prompts, one or several in a request, and their continuations."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET

from tercel.config import SamplingParams
from tercel.core.sampling import TokenLogprobs
from tercel.errors import RequestError
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.tokenizer import Tokenizer
from tercel.server.protocol import MAX_LOGPROBS, CompletionRequest, parse
from tercel.server.responses import (
    TextChoice,
    TextCompletion,
    TextLogprobs,
    Usage,
    completion_details,
)
from tercel.server.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this endpoint."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request and how its continuation is drawn."""

    index: int
    ids: list[int]
    params: SamplingParams
    echo: str
    """Text that the answer repeats first."""


@dataclass(frozen=True)
class CompletionJob:
    """One checked completion request, ready to run."""

    service: Service
    prompts: list[Prompt]
    is_stream: bool
    includes_usage: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def prepare(cls, service: Service, body: bytes) -> "CompletionJob":
        """Reads, checks and tokenizes a request.

        Raises:
            RequestError: the first field that is wrong.
            NotReady: the engine is loading or has died.
        """
        request = parse(CompletionRequest, body)
        service.check_model(request.model)
        if request.logprobs is not None and request.echo:
            raise RequestError("echo", "log-probabilities of the prompt are not built; remove it")
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
            raise RequestError("logprobs", f"{request.logprobs} is outside 0 .. {MAX_LOGPROBS}")
        return cls(
            service=service,
            prompts=[
                _prompt(service, request, index, prompt)
                for index, prompt in enumerate(request.prompts())
            ],
            is_stream=bool(request.stream),
            includes_usage=request.includes_usage or not request.stream,
        )

    async def chunks(self) -> AsyncGenerator[TextCompletion]:
        """The continuations as they grow, interleaved; the last chunk holds the usage."""
        latest: dict[int, RequestOutput] = {}
        async with aclosing(_merged([self._choices(p, latest) for p in self.prompts])) as choices:
            async for choice in choices:
                yield self._chunk([choice])
        if self.includes_usage:
            prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
            written = sum(output.completion_tokens for output in latest.values())
            details = completion_details(latest.values())
            usage = Usage(
                prompt_tokens,
                written,
                prompt_tokens + written,
                completion_tokens_details=details,
            )
            yield self._chunk([], usage)

    def collect(self, chunks: Sequence[TextCompletion]) -> TextCompletion:
        """The chunks as one answer."""
        pieces: list[list[TextChoice]] = [[] for _ in self.prompts]
        for chunk in chunks:
            for choice in chunk.choices:
                pieces[choice.index].append(choice)
        choices = [
            TextChoice(
                text="".join(piece.text for piece in parts),
                index=index,
                finish_reason=parts[-1].finish_reason,
                logprobs=_joined([piece.logprobs for piece in parts if piece.logprobs]),
            )
            for index, parts in enumerate(pieces)
        ]
        usage = chunks[-1].usage
        return TextCompletion(self.id, self.created, self.service.model, choices, usage=usage)

    async def _choices(
        self, prompt: Prompt, latest: dict[int, RequestOutput]
    ) -> AsyncGenerator[TextChoice]:
        """The pieces of one prompt's continuation; keeps its last output in `latest`."""
        request_id = f"{self.id}-{prompt.index}"
        echo, offset = prompt.echo, len(prompt.echo)
        outputs = self.service.generate(request_id, prompt.ids, prompt.params)
        async with aclosing(outputs):
            async for output in outputs:
                latest[prompt.index] = output
                logprobs = None
                if output.logprobs:
                    logprobs = _logprobs(self.service.tokenizer, output.logprobs, offset)
                    offset += sum(map(len, logprobs.tokens))
                text, echo = echo + output.text, ""
                if text or logprobs or output.finish_reason:
                    yield TextChoice(text, prompt.index, output.finish_reason, logprobs)

    def _chunk(self, choices: list[TextChoice], usage: Usage | None = None) -> TextCompletion:
        model = self.service.model
        return TextCompletion(self.id, self.created, model, choices, usage=usage or UNSET)


def _prompt(
    service: Service, request: CompletionRequest, index: int, prompt: str | list[int]
) -> Prompt:
    ids = service.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    params = request.sampling_params(
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        stop=request.stop_strings(),
    )
    service.engine.limits.check(ids, params)
    return Prompt(index, ids, params, service.tokenizer.decode(ids) if request.echo else "")


async def _merged(
    generators: Sequence[AsyncGenerator[TextChoice]],
) -> AsyncGenerator[TextChoice]:
    """The items of all generators as they come. The first error, or closing, closes them all."""
    queue: asyncio.Queue[TextChoice | None] = asyncio.Queue()

    async def drain(generator: AsyncGenerator[TextChoice]) -> None:
        async with aclosing(generator):
            async for item in generator:
                queue.put_nowait(item)

    async def drain_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for generator in generators:
                    group.create_task(drain(generator))
        except* Exception as errors:
            raise errors.exceptions[0] from None
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(drain_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])


def _logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], offset: int) -> TextLogprobs:
    tokens = [tokenizer.decode([entry.token]) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return TextLogprobs(
        tokens=tokens,
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[
            {tokenizer.decode([token]): logprob for token, logprob in entry.top}
            for entry in entries
        ],
        text_offset=offsets,
    )


def _joined(parts: Sequence[TextLogprobs]) -> TextLogprobs | None:
    if not parts:
        return None
    return TextLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[best for part in parts for best in part.top_logprobs],
        text_offset=[start for part in parts for start in part.text_offset],
    )
