"""Markers that a model spells with ordinary tokens instead of control tokens.

They are text, so quoting a marker is harmless; but at the end of a channel whose real closing
marker is missing, they are what the model meant by it.
"""

import re

from tercel.runtime.tokenizer import CLOSE, END_OF_MSG, OPEN, SEP

_THINK_END = f"{CLOSE}think{SEP}"
_RESPONSE_START = f"{OPEN}response{SEP}"
_MARKERS = (
    _THINK_END,
    _RESPONSE_START,
    f"{CLOSE}response{SEP}",
    f"{CLOSE}message{SEP}",
    END_OF_MSG,
)
_WHOLE = "(?:" + "|".join(re.escape(marker) for marker in _MARKERS) + ")"
_PREFIXES = sorted({marker[:end] for marker in _MARKERS for end in range(1, len(marker))})
_PREFIX = "(?:" + "|".join(re.escape(prefix) for prefix in _PREFIXES) + ")?"
_TAIL = re.compile(rf"{_WHOLE}*{_PREFIX}\Z")
_COMPLETE = re.compile(rf"{_WHOLE}+")
_COMPLETE_TAIL = re.compile(rf"{_WHOLE}+\Z")


class HeldTail:
    """Holds back the end of a channel's text while it may be spelled markers."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certainly text now."""
        text = self._held + text
        match = _TAIL.search(text)
        cut = match.start() if match else len(text)
        self._held = text[cut:]
        return text[:cut]

    def release(self, *, is_closed: bool) -> str:
        """The rest when the channel ends: markers are dropped unless a real one closed it."""
        held, self._held = self._held, ""
        return held if is_closed or not _COMPLETE.fullmatch(held) else ""


def answer_after_thinking(text: str) -> str | None:
    """What follows the spelled end of thinking in a think channel's text; None without one."""
    for marker in (_RESPONSE_START, _THINK_END):
        _, found, answer = text.rpartition(marker)
        if found:
            return without_tail(answer)
    return None


def without_tail(text: str) -> str:
    """Text without the spelled markers at its end."""
    return _COMPLETE_TAIL.sub("", text)
