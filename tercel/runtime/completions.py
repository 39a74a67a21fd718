"""Whole answers, added up from the engine's outputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tercel.core.sampling import TokenLogprobs
from tercel.runtime.chat import (
    AssistantMessage,
    Channel,
    ChatParser,
    ContentDelta,
    Event,
    ReasoningDelta,
    collect,
)
from tercel.runtime.output_text import StopStrings
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.sequence import FinishReason
from tercel.runtime.tokenizer import Tokenizer

ChatFinishReason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt; the fields are those of RequestOutput."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: str | None
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> "Completion":
        """Adds up all outputs of one request."""
        outputs = list(outputs)
        last = outputs[-1]
        return cls(
            text="".join(output.text for output in outputs),
            token_ids=tuple(token for output in outputs for token in output.token_ids),
            logprobs=tuple(item for output in outputs for item in output.logprobs),
            finish_reason=last.finish_reason or "abort",
            stop_reason=last.stop_reason,
            error=last.error,
            prompt_tokens=last.prompt_tokens,
            completion_tokens=last.completion_tokens,
        )


@dataclass(frozen=True)
class ChatCompletion:
    """An assistant message and the completion that it was parsed from."""

    message: AssistantMessage
    completion: Completion
    reasoning_tokens: int
    """Tokens of the think channel, within completion_tokens."""

    @property
    def reasoning_content(self) -> str:
        return self.message.reasoning_content

    @property
    def content(self) -> str:
        return self.message.content

    @property
    def finish_reason(self) -> ChatFinishReason:
        """tool_calls if the message ended by itself and holds calls."""
        ended = self.completion.finish_reason
        return self.message.finish_reason if ended == "stop" else ended


class ChatAssembler:
    """Turns the outputs of a chat request into events, cut before a stop string.

    The parser reads tokens, which hold the stop string that the engine stopped at.
    """

    def __init__(self, tokenizer: Tokenizer, start: Channel, stop: Sequence[str] = ()) -> None:
        """`start`: the channel that the prompt ends in."""
        self._parser = ChatParser(tokenizer, start=start)
        self._stop = tuple(stop)
        self._channel: type[ReasoningDelta | ContentDelta] = ReasoningDelta
        self._cut = StopStrings(self._stop)
        self._events: list[Event] = []
        self._outputs: list[RequestOutput] = []

    def push(self, output: RequestOutput) -> list[Event]:
        """The events of an output; after the request's last one, Done is the last event."""
        self._outputs.append(output)
        events = self._parser.push(output.token_ids)
        if output.finish_reason is not None:
            events += self._parser.finish()
        events = [new for event in events for new in self._within_stop(event)]
        self._events += events
        return events

    def result(self) -> ChatCompletion:
        """The whole answer, once the request has ended."""
        return ChatCompletion(
            collect(self._events),
            Completion.of(self._outputs),
            self._parser.num_reasoning_tokens,
        )

    def _within_stop(self, event: Event) -> list[Event]:
        if isinstance(event, ReasoningDelta | ContentDelta) and isinstance(event, self._channel):
            text = self._cut.push(event.text)
            return [replace(event, text=text)] if text else []
        held = self._cut.flush()
        before: list[Event] = [self._channel(held)] if held else []
        if not isinstance(event, ReasoningDelta | ContentDelta):
            return [*before, event]
        self._channel, self._cut = type(event), StopStrings(self._stop)
        return before + self._within_stop(event)
