"""Whole answers, added up from the engine's outputs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tercel.config import SamplingParams
from tercel.core.sampling import TokenLogprobs
from tercel.runtime.chat import (
    AssistantMessage,
    Channel,
    ChatParser,
    ContentDelta,
    Done,
    Event,
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
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_acceptance: bool = False

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
            rounds=last.rounds,
            drafted_tokens=last.drafted_tokens,
            accepted_tokens=last.accepted_tokens,
            forced_acceptance=last.forced_acceptance,
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
    """Turns the outputs of a chat request into events.

    Stop strings are looked for in the answer only, so that thinking never ends at one. They are
    matched here: run the request without them, and end it once there is a finish_reason.
    """

    def __init__(self, tokenizer: Tokenizer, start: Channel, params: SamplingParams) -> None:
        """`start`: the channel that the prompt ends in."""
        self._parser = ChatParser(tokenizer, start=start)
        self._stop = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        self._events: list[Event] = []
        self._outputs: list[RequestOutput] = []
        self.finish_reason: ChatFinishReason | None = None
        """Set by the push that ends the answer."""

    def push(self, output: RequestOutput) -> list[Event]:
        """The events of an output, cut before a stop string; Done is the last of an answer."""
        self._outputs.append(output)
        may_stop = output.completion_tokens > self._min_tokens
        events = self._parser.push(output.token_ids)
        if output.finish_reason is not None:
            events += self._parser.finish()
        events = [new for event in events for new in self._within_stop(event, may_stop)]
        self._events += events
        if self._stop.found is not None:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = self.result().finish_reason
        return events

    def result(self) -> ChatCompletion:
        """The whole answer so far."""
        completion = Completion.of(self._outputs)
        if self._stop.found is not None:
            completion = replace(completion, finish_reason="stop", stop_reason=self._stop.found)
        reasoning_tokens = self._parser.num_reasoning_tokens
        return ChatCompletion(collect(self._events), completion, reasoning_tokens)

    def _within_stop(self, event: Event, may_stop: bool) -> list[Event]:
        if self._stop.found is not None:
            return []
        if not isinstance(event, ContentDelta):
            held = self._stop.flush()
            return [ContentDelta(held), event] if held else [event]
        text = self._stop.push(event.text) if may_stop else event.text
        end: list[Event] = [] if self._stop.found is None else [Done("stop")]
        return [ContentDelta(text), *end] if text else end
