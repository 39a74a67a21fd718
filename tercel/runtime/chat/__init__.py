"""K3's chat encoding and its inverse."""

from tercel.runtime.chat.encoding import render
from tercel.runtime.chat.events import (
    AssistantMessage,
    ContentDelta,
    Done,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStart,
    collect,
)
from tercel.runtime.chat.parser import ChatParser
from tercel.runtime.chat.segments import Channel, Segment, encode, start_channel

__all__ = [
    "AssistantMessage",
    "Channel",
    "ChatParser",
    "ContentDelta",
    "Done",
    "Event",
    "ReasoningDelta",
    "Segment",
    "ToolArgumentsDelta",
    "ToolCall",
    "ToolCallStart",
    "collect",
    "encode",
    "render",
    "start_channel",
]
