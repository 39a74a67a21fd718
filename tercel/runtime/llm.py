"""A model in the caller's process: prompts or messages in, answers or streams out."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast, overload

from tercel.config import EngineConfig, SamplingParams
from tercel.errors import EngineError, RequestError
from tercel.runtime.chat import Channel, Done, Event, encode, render, start_channel
from tercel.runtime.checkpoint import open_checkpoint
from tercel.runtime.completions import ChatAssembler, ChatCompletion, Completion
from tercel.runtime.engine import Engine
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.runner import OpenModel, ReportProgress

ChatItem = Event | ChatCompletion


class LLM:
    """Loads a checkpoint directory and answers. For use from one thread."""

    def __init__(
        self,
        model: str | Path,
        *,
        progress: ReportProgress | None = None,
        open_model: Callable[[EngineConfig], OpenModel] = open_checkpoint,
        **options: Any,
    ) -> None:
        """`options` are the fields of EngineConfig.

        Raises:
            ConfigError, CheckpointError: what is wrong, and the fix.
        """
        config = EngineConfig.from_dict({"model": str(model), **options})
        self.engine = Engine(config, progress=progress, open_model=open_model)
        self.tokenizer = self.engine.tokenizer
        self._names = count()
        self._unread: dict[str, deque[RequestOutput]] = {}

    @overload
    def generate(
        self, prompts: str | Sequence[int], params: SamplingParams | None = None
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
    ) -> Iterator[RequestOutput]: ...
    def generate(
        self,
        prompts: str | Sequence[int] | list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> Completion | list[Completion] | Iterator[RequestOutput]:
        """Continues one prompt (text or token ids), or a list of prompts together.

        Raises:
            RequestError: what is wrong with a prompt or a parameter; nothing has run then.
        """
        params = params or SamplingParams()
        batch, is_batch = self._batch(prompts)
        for ids in batch:
            self.engine.limits.check(ids, params)
        if stream and is_batch:
            raise RequestError("stream", "stream one prompt at a time, or leave it out")
        if stream:
            return self._stream(batch[0], params)
        completions = self._run(batch, params)
        return completions if is_batch else completions[0]

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> ChatCompletion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> Iterator[ChatItem]: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> ChatCompletion | Iterator[ChatItem]:
        """Answers a conversation in the OpenAI form.

        Args:
            stream: give events as they come and, last, the ChatCompletion.
            options: tools, thinking, effort, tool_choice, response_format; see
                tercel.runtime.chat.render.
        Raises:
            RequestError: what is wrong with a message, an option or a parameter.
        """
        params = params or SamplingParams()
        segments = render(messages, **options)
        prompt = encode(self.tokenizer, segments)
        self.engine.limits.check(prompt, params)
        items = self._chat(prompt, params, start_channel(segments))
        if stream:
            return items
        *_, last = items
        assert isinstance(last, ChatCompletion)
        return last

    def close(self) -> None:
        """Frees the model."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _batch(
        self, prompts: str | Sequence[int] | list[str] | list[list[int]]
    ) -> tuple[list[Sequence[int]], bool]:
        """Token ids of every prompt, and whether it was a list of prompts."""
        if isinstance(prompts, str):
            return [self.tokenizer.encode(prompts)], False
        if all(isinstance(item, int) for item in prompts):
            return [cast("Sequence[int]", prompts)], False
        items = cast("list[str] | list[list[int]]", prompts)
        encode = self.tokenizer.encode
        return [encode(item) if isinstance(item, str) else item for item in items], True

    def _chat(
        self, prompt: Sequence[int], params: SamplingParams, start: Channel
    ) -> Iterator[ChatItem]:
        assembler = ChatAssembler(self.tokenizer, start, params)
        with closing(self._stream(prompt, replace(params, stop=()))) as outputs:
            while assembler.finish_reason is None:
                events = assembler.push(next(outputs))
                yield from (event for event in events if not isinstance(event, Done))
        yield assembler.result()

    def _run(self, prompts: list[Sequence[int]], params: SamplingParams) -> list[Completion]:
        names = [self._submit(prompt, params) for prompt in prompts]
        try:
            return [Completion.of(self._outputs(name)) for name in names]
        finally:
            for name in names:
                self._forget(name)

    def _stream(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        """Submits when first read, so that a stream that nobody reads costs nothing."""
        name = self._submit(prompt, params)
        try:
            yield from self._outputs(name)
        finally:
            self._forget(name)

    def _submit(self, prompt: Sequence[int], params: SamplingParams) -> str:
        name = str(next(self._names))
        self.engine.add_request(name, prompt, params)
        self._unread[name] = deque()
        return name

    def _outputs(self, name: str) -> Iterator[RequestOutput]:
        """Steps the engine while there is nothing to read. Other requests advance as well, and
        their outputs wait for their own readers."""
        unread, is_running = self._unread[name], True
        while is_running:
            while not unread:
                if not self.engine.has_work:
                    raise EngineError("the request was ended by Ctrl-C in another request's step")
                for output in self.engine.step():
                    self._unread[output.request_id].append(output)
            is_running = unread[0].finish_reason is None
            yield unread.popleft()

    def _forget(self, name: str) -> None:
        self.engine.abort(name)
        self._unread.pop(name, None)
