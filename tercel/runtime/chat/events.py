"""What the parser says about a model's output, and the message that it adds up to."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "tool_calls"]


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More text of the response channel."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; `index` counts from 0 within the message."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArgumentsDelta:
    """More of a call's arguments, as JSON text; what was sent before stays valid."""

    index: int
    text: str


@dataclass(frozen=True)
class Done:
    """The message is over. The reason holds unless the engine cut the generation."""

    finish_reason: FinishReason


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | Done


@dataclass(frozen=True)
class ToolCall:
    """A call; `arguments` is JSON text, cut short where the generation was."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class AssistantMessage:
    """A parsed model output."""

    reasoning_content: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason

    def to_message(self) -> dict[str, Any]:
        """The message in the OpenAI form, as `render` takes it back in a later turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def collect(events: Iterable[Event]) -> AssistantMessage:
    """Adds up all events of one output; a complete answer is nothing but its collected stream."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: dict[int, list[str]] = {}
    finish_reason: FinishReason = "stop"
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(index):
                starts.append(event)
                arguments[index] = []
            case ToolArgumentsDelta(index, text):
                arguments[index].append(text)
            case Done(reason):
                finish_reason = reason
    calls = (ToolCall(call.id, call.name, "".join(arguments[call.index])) for call in starts)
    return AssistantMessage("".join(reasoning), "".join(content), tuple(calls), finish_reason)
