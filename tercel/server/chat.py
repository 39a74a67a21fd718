"""/v1/chat/completions: a conversation to a prompt, and the model's output to message deltas.

There is one path: a complete answer is nothing but its collected chunks.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from msgspec import UNSET

from tercel.config import SamplingParams
from tercel.core.sampling import TokenLogprobs
from tercel.errors import RequestError
from tercel.runtime.chat import (
    Channel,
    ContentDelta,
    Done,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    encode,
    render,
    start_channel,
)
from tercel.runtime.completions import ChatAssembler
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.tokenizer import Tokenizer
from tercel.server.protocol import ChatRequest, parse
from tercel.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    completion_details,
)
from tercel.server.service import Service


@dataclass(frozen=True)
class ChatJob:
    """One checked chat request, ready to run."""

    service: Service
    prompt_ids: list[int]
    params: SamplingParams
    start: Channel
    """The channel that the output begins in."""
    is_stream: bool
    includes_usage: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def prepare(cls, service: Service, body: bytes) -> "ChatJob":
        """Reads, checks, renders and tokenizes a request.

        Raises:
            RequestError: the first field that is wrong.
            NotReady: the engine is loading or has died.
        """
        request = parse(ChatRequest, body)
        service.check_model(request.model)
        segments = render(
            [message.to_dict() for message in request.messages],
            tools=request.tools,
            thinking=request.thinks(),
            effort=request.effort(),
            tool_choice=request.tool_choice,
            response_format=request.response_format,
        )
        limits, limit = service.engine.limits, request.max_output()
        prompt_ids = encode(service.tokenizer, segments)
        # The engine also ends an answer where the context is full.
        params = request.sampling_params(
            max_tokens=limits.max_model_len if limit is None else limit,
            logprobs=request.num_logprobs(),
            stop=request.stop_strings(),
        )
        try:
            limits.check(prompt_ids, params)
        except RequestError as error:
            if error.field != "prompt":
                raise
            raise RequestError("messages", str(error).removeprefix("prompt: ")) from error
        return cls(
            service=service,
            prompt_ids=prompt_ids,
            params=params,
            start=start_channel(segments),
            is_stream=bool(request.stream),
            includes_usage=request.includes_usage or not request.stream,
        )

    async def chunks(self) -> AsyncGenerator[ChatChunk]:
        """The answer as it grows; the last chunk holds the usage where it was asked for."""
        writer = _Writer(self)
        # Stop strings are matched in the answer, so that thinking never ends at one.
        params = replace(self.params, stop=())
        outputs = self.service.generate(self.id, self.prompt_ids, params)
        async with aclosing(outputs):
            async for output in outputs:
                for choice in writer.choices(output):
                    yield self._chunk([choice])
                if writer.is_finished:
                    break
        if self.includes_usage:
            yield self._chunk([], writer.usage())

    def collect(self, chunks: Sequence[ChatChunk]) -> ChatCompletion:
        """The chunks as one answer."""
        choices = [choice for chunk in chunks for choice in chunk.choices]
        usage = chunks[-1].usage
        assert isinstance(usage, Usage)
        deltas = [choice.delta for choice in choices]
        calls = _tool_calls(deltas)
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(delta.reasoning_content or "" for delta in deltas)
        message = ChatMessage(
            content=None if calls and not content else content,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        tokens = [token for choice in choices for token in _content(choice.logprobs)]
        choice = ChatChoice(
            message,
            finish_reason=choices[-1].finish_reason or "stop",
            logprobs=None if self.params.logprobs is None else ChatLogprobs(tokens),
        )
        return ChatCompletion(self.id, self.created, self.service.model, [choice], usage)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(self.id, self.created, self.service.model, choices, usage=usage or UNSET)


class _Writer:
    """Turns the outputs of one request into the choices of its chunks."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._tokenizer = job.service.tokenizer
        self._assembler = ChatAssembler(self._tokenizer, job.start, job.params)
        self._num_tokens = 0
        self._latest: RequestOutput | None = None

    @property
    def is_finished(self) -> bool:
        return self._assembler.finish_reason is not None

    def choices(self, output: RequestOutput) -> list[ChunkChoice]:
        """The choices of one output. Log-probabilities ride on its first one."""
        deltas = [] if self._num_tokens else [Delta(role="assistant", content="")]
        deltas += [_delta(e) for e in self._assembler.push(output) if not isinstance(e, Done)]
        self._num_tokens, self._latest = output.completion_tokens, output
        choices = [ChunkChoice(delta) for delta in deltas]
        if self.is_finished:
            choices.append(ChunkChoice(Delta(), finish_reason=self._assembler.finish_reason))
        if output.logprobs:
            logprobs = ChatLogprobs([_token_logprob(self._tokenizer, t) for t in output.logprobs])
            first = choices[0] if choices else ChunkChoice(Delta())
            choices[:1] = [ChunkChoice(first.delta, first.index, first.finish_reason, logprobs)]
        return choices

    def usage(self) -> Usage:
        """Tokens of the prompt and of the answer so far."""
        num_prompt, num_output = len(self._job.prompt_ids), self._num_tokens
        latest = [] if self._latest is None else [self._latest]
        reasoning_tokens = self._assembler.result().reasoning_tokens
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            completion_tokens_details=completion_details(latest, reasoning_tokens),
        )


def _delta(event: ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta) -> Delta:
    match event:
        case ReasoningDelta(text):
            return Delta(reasoning_content=text)
        case ContentDelta(text):
            return Delta(content=text)
        case ToolCallStart(index, call_id, name):
            function = FunctionDelta(name=name, arguments="")
            return Delta(tool_calls=[ToolCallDelta(index, function, call_id, "function")])
        case ToolArgumentsDelta(index, text):
            return Delta(tool_calls=[ToolCallDelta(index, FunctionDelta(arguments=text))])


def _tool_calls(deltas: Iterable[Delta]) -> list[ToolCall]:
    """Whole calls from their pieces; the first piece of a call names it."""
    calls: list[ToolCallDelta] = []
    arguments: list[str] = []
    for delta in deltas:
        for piece in delta.tool_calls or ():
            if piece.id is not UNSET:
                calls.append(piece)
                arguments.append("")
            arguments[piece.index] += piece.function.arguments or ""
    return [
        ToolCall(str(call.id), FunctionCall(str(call.function.name), text))
        for call, text in zip(calls, arguments, strict=True)
    ]


def _token_logprob(tokenizer: Tokenizer, entry: TokenLogprobs) -> TokenLogprob:
    def spelled(token: int) -> tuple[str, list[int]]:
        return tokenizer.decode([token]), list(tokenizer.decode_bytes([token]))

    top = []
    for token, logprob in entry.top:
        text, raw = spelled(token)
        top.append(TopLogprob(text, logprob, raw))
    text, raw = spelled(entry.token)
    return TokenLogprob(text, entry.logprob, raw, top)


def _content(logprobs: ChatLogprobs | None) -> list[TokenLogprob]:
    return logprobs.content if logprobs else []
