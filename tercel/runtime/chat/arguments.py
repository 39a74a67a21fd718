"""JSON text of a tool call's arguments, written while the call is parsed."""

import json
from enum import Enum

_JSON_WHITESPACE = " \t\n\r"


class _Mode(Enum):
    OUTSIDE = "between arguments"
    STRING = "a string, streamed"
    VALUE = "another JSON value, written once complete"
    RAW = "the whole arguments as one text, streamed"
    SKIPPED = "not written: no key, a repeated key, or arguments beside a raw text"


class ArgumentsWriter:
    """Methods return the JSON text to append; what they returned before stays valid."""

    def __init__(self) -> None:
        self._mode = _Mode.OUTSIDE
        self._keys: set[str] = set()
        self._value: list[str] = []
        self._raw_chars: int | None = None

    def open_argument(self, key: str | None, kind: str | None) -> str:
        """An argument begins; a kind that is missing is a string."""
        if key is None or key in self._keys or self._raw_chars is not None:
            self._mode = _Mode.SKIPPED
            return ""
        prefix = "{" if not self._keys else ", "
        self._keys.add(key)
        prefix += json.dumps(key, ensure_ascii=False) + ": "
        if kind in ("number", "boolean", "null", "object", "array"):
            self._mode = _Mode.VALUE
            self._value = [prefix]
            return ""
        self._mode = _Mode.STRING
        return prefix + '"'

    def open_raw(self) -> None:
        """A text that stands for all arguments begins: the model's own JSON, right or wrong."""
        if self._keys or self._raw_chars is not None:
            self._mode = _Mode.SKIPPED
        else:
            self._mode = _Mode.RAW
            self._raw_chars = 0

    def text(self, text: str) -> str:
        """Text of the open argument."""
        match self._mode:
            case _Mode.STRING:
                return json.dumps(text, ensure_ascii=False)[1:-1]
            case _Mode.RAW:
                self._raw_chars = (self._raw_chars or 0) + len(text)
                return text
            case _Mode.VALUE:
                self._value.append(text)
        return ""

    def close_argument(self) -> str:
        """The open argument ends. A value that is not JSON is written as a string."""
        mode, self._mode = self._mode, _Mode.OUTSIDE
        if mode is _Mode.STRING:
            return '"'
        if mode is not _Mode.VALUE:
            return ""
        prefix, text = self._value[0], "".join(self._value[1:])
        if is_json(text):
            return prefix + text.strip(_JSON_WHITESPACE)
        return prefix + json.dumps(text, ensure_ascii=False)

    def close(self) -> str:
        """The call ends."""
        end = self.close_argument()
        if self._raw_chars:
            return end
        return end + ("}" if self._keys else "{}")


def is_json(text: str) -> bool:
    """Whether text is one JSON value; NaN and infinities are not."""
    try:
        json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return False
    return True


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
