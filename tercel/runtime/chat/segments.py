"""Pieces of a chat prompt. Each piece is tokenized on its own, so that text never becomes control.

    open(tag, k=v) = <|open|> tag ` k` `="` v `"` <|sep|>       close(tag) = <|close|> tag <|sep|>

Every word between the control tokens is its own piece; joining them gives other ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tercel.runtime.tokenizer import CLOSE, END_OF_MSG, OPEN, SEP, Tokenizer

Channel = Literal["think", "response"]


@dataclass(frozen=True)
class Segment:
    """A control token by name (`special`) or a piece of ordinary text."""

    text: str
    special: bool = False


END_OF_MESSAGE = Segment(END_OF_MSG, special=True)


def text(value: str) -> list[Segment]:
    """Ordinary text; control tokens spelled in it stay text."""
    return [Segment(value)] if value else []


def open_tag(tag: str, *attributes: tuple[str, str]) -> list[Segment]:
    """`<|open|>tag key="value"...<|sep|>`; `&` and `"` of a value are escaped."""
    segments = [Segment(OPEN, special=True), Segment(tag)]
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [Segment(f" {key}"), Segment('="'), *text(escaped), Segment('"')]
    return [*segments, Segment(SEP, special=True)]


def close_tag(tag: str) -> list[Segment]:
    """`<|close|>tag<|sep|>`."""
    return [Segment(CLOSE, special=True), Segment(tag), Segment(SEP, special=True)]


def encode(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Token ids of a prompt, segment by segment."""
    ids: list[int] = []
    for segment in segments:
        if segment.special:
            ids.append(tokenizer.encode_special(segment.text))
        else:
            ids += tokenizer.encode(segment.text)
    return ids


def start_channel(segments: Sequence[Segment]) -> Channel:
    """The channel that a prompt ends in: where the model's output, and its parser, start."""
    tags = (
        tag.text
        for control, tag in zip(segments[-2::-1], segments[:0:-1], strict=True)
        if control == Segment(OPEN, special=True)
    )
    return "think" if next(tags, "response") == "think" else "response"
