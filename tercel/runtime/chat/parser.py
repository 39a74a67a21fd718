"""The inverse of the chat encoding: a state machine from token ids to events.

    THINK -> RESPONSE -> TOOLS(CALL) -> CLOSED -> DONE

A model's output starts inside the channel that its prompt opened. Only real control tokens open
and close channels, so a quoted marker stays text and never becomes a tool call. What models get
wrong is accepted: a missing or misplaced close, a skipped think channel, a spelled separator.
"""

import uuid
from collections.abc import Iterable, Mapping
from enum import Enum

from tercel.runtime.chat.arguments import ArgumentsWriter
from tercel.runtime.chat.events import (
    ContentDelta,
    Done,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from tercel.runtime.chat.lexer import Close, End, Lexeme, Lexer, Open, Text
from tercel.runtime.chat.segments import Channel
from tercel.runtime.chat.spelled import HeldTail, answer_after_thinking, without_tail
from tercel.runtime.tokenizer import Tokenizer


class State(Enum):
    """Where in the message the output is."""

    THINK = "think"
    BETWEEN = "between"
    RESPONSE = "response"
    TOOLS = "tools"
    CALL = "call"
    CLOSED = "closed"
    DONE = "done"


class ChatParser:
    """Parses one output. The events do not depend on how the ids are split into pushes.

    A think channel that turns out to hold the answer (the model skipped thinking) was streamed as
    reasoning already; its answer follows once more as content, so that content is never empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: Channel = "think",
        call_id_prefix: str | None = None,
    ) -> None:
        """`start`: see `start_channel`. Call ids are the prefix (default: a random one) + index."""
        self._lexer = Lexer(tokenizer)
        self._state = State(start)
        self._call_id_prefix = call_id_prefix or f"call_{uuid.uuid4().hex[:16]}_"
        self._events: list[Event] = []
        self._tail = HeldTail()
        self._thought: list[str] = []
        self._num_calls = 0
        self._arguments: ArgumentsWriter | None = None
        self.num_reasoning_tokens = 0

    @property
    def state(self) -> State:
        """The state after the ids so far."""
        return self._state

    def push(self, token_ids: Iterable[int]) -> list[Event]:
        """The events of these ids. A sampled stop token belongs to them: it completes the message.

        Raises:
            RequestError: an id outside the vocabulary.
        """
        for token_id in token_ids:
            self.num_reasoning_tokens += self._state is State.THINK
            for lexeme in self._lexer.push(token_id):
                self._step(lexeme)
        return self._take_events()

    def finish(self) -> list[Event]:
        """The last events. An output cut short keeps its text where it stands: reasoning stays
        reasoning, and the arguments of an open call stay incomplete."""
        for lexeme in self._lexer.flush():
            self._step(lexeme)
        self._emit_channel(self._tail.release(is_closed=True))
        self._finish_message()
        return self._take_events()

    def _step(self, lexeme: Lexeme) -> None:
        if self._state is State.DONE:
            return
        match lexeme:
            case Text(text):
                self._text(text)
            case Open(tag, attributes):
                self._open(tag, attributes)
            case Close("message"):
                self._end(has_close=True)
            case Close(tag):
                self._close(tag)
            case End():
                self._end(has_close=False)

    def _text(self, text: str) -> None:
        if self._state is State.BETWEEN:
            text = text.lstrip()
            if text:
                self._state = State.RESPONSE
        if self._state is State.THINK:
            self._thought.append(text)
        if self._state in (State.THINK, State.RESPONSE):
            self._emit_channel(self._tail.push(text))
        elif self._state is State.CALL and self._arguments is not None:
            self._emit_arguments(self._arguments.text(text))

    def _open(self, tag: str, attributes: Mapping[str, str]) -> None:
        match self._state, tag:
            case State.THINK | State.RESPONSE | State.BETWEEN, "think" | "response" | "tools":
                if self._state.value != tag:
                    self._leave_channel(is_closed=False)
                    self._state = State(tag)
            case State.BETWEEN | State.TOOLS | State.CALL, "call":
                self._close_call()
                self._open_call(attributes.get("tool"))
            case State.CALL, "argument" if self._arguments is not None:
                self._emit_arguments(self._arguments.close_argument())
                key, kind = attributes.get("key"), attributes.get("type")
                self._emit_arguments(self._arguments.open_argument(key, kind))
            case State.CALL, "json" if self._arguments is not None:
                self._emit_arguments(self._arguments.close_argument())
                self._arguments.open_raw()

    def _close(self, tag: str) -> None:
        match self._state, tag:
            case State.THINK, "think":
                self._leave_channel(is_closed=True)
            case State.THINK, "response":
                self._answer_from_thinking(is_certain=True)
                self._leave_channel(is_closed=False)
            case State.RESPONSE, "response":
                self._leave_channel(is_closed=True)
            case State.CALL, "argument" | "json" if self._arguments is not None:
                self._emit_arguments(self._arguments.close_argument())
            case State.CALL, "call":
                self._close_call()
                self._state = State.TOOLS
            case State.TOOLS | State.CALL, "tools":
                self._close_call()
                self._state = State.CLOSED

    def _end(self, *, has_close: bool) -> None:
        if self._state is State.THINK:
            self._answer_from_thinking(is_certain=has_close)
        self._leave_channel(is_closed=False)
        self._close_call()
        self._finish_message()

    def _answer_from_thinking(self, *, is_certain: bool) -> None:
        """Thinking ended as only a response ends: its text is the answer, or ends in it.

        A stop token alone (not `is_certain`) proves it only after a spelled end of thinking.
        """
        thought = "".join(self._thought)
        answer = answer_after_thinking(thought)
        if answer is None and is_certain:
            answer = without_tail(thought)
        self._leave_channel(is_closed=False)
        if answer:
            self._events.append(ContentDelta(answer))

    def _leave_channel(self, *, is_closed: bool) -> None:
        if self._state in (State.THINK, State.RESPONSE):
            self._emit_channel(self._tail.release(is_closed=is_closed))
            self._thought = []
            self._state = State.BETWEEN

    def _open_call(self, name: str | None) -> None:
        self._state = State.CALL
        if name:
            index = self._num_calls
            self._num_calls += 1
            self._arguments = ArgumentsWriter()
            self._events.append(ToolCallStart(index, f"{self._call_id_prefix}{index}", name))

    def _close_call(self) -> None:
        if self._arguments is not None:
            self._emit_arguments(self._arguments.close())
            self._arguments = None

    def _emit_channel(self, text: str) -> None:
        if text:
            is_think = self._state is State.THINK
            self._events.append(ReasoningDelta(text) if is_think else ContentDelta(text))

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._events.append(ToolArgumentsDelta(self._num_calls - 1, text))

    def _finish_message(self) -> None:
        if self._state is not State.DONE:
            self._state = State.DONE
            self._events.append(Done("tool_calls" if self._num_calls else "stop"))

    def _take_events(self) -> list[Event]:
        """The new events, neighbours of one kind joined."""
        events: list[Event] = []
        for event in self._events:
            match events[-1:], event:
                case [ReasoningDelta(before)], ReasoningDelta(after):
                    events[-1] = ReasoningDelta(before + after)
                case [ContentDelta(before)], ContentDelta(after):
                    events[-1] = ContentDelta(before + after)
                case [ToolArgumentsDelta(index, before)], ToolArgumentsDelta(same, after) if (
                    index == same
                ):
                    events[-1] = ToolArgumentsDelta(index, before + after)
                case _:
                    events.append(event)
        self._events = []
        return events
