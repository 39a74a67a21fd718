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
    """Every method returns the JSON text to append; what it returned before stays valid."""

    def __init__(self) -> None:
        self._mode = _Mode.OUTSIDE
        self._keys: set[str] = set()
        self._value: list[str] = []
        self._is_raw = False
        self._is_empty = True

    @property
    def is_inside(self) -> bool:
        """Whether text belongs to an argument now."""
        return self._mode is not _Mode.OUTSIDE

    def open_argument(self, key: str | None, kind: str | None) -> str:
        """An argument begins; a kind that is missing is a string."""
        if key is None or key in self._keys or self._is_raw:
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
        return self._written(prefix + '"')

    def open_raw(self) -> str:
        """A text that stands for all arguments begins: the model's own JSON, right or wrong."""
        self._mode = _Mode.SKIPPED if self._keys or self._is_raw else _Mode.RAW
        self._is_raw = self._mode is _Mode.RAW or self._is_raw
        return ""

    def text(self, text: str) -> str:
        """Text of the open argument."""
        match self._mode:
            case _Mode.STRING:
                return self._written(json.dumps(text, ensure_ascii=False)[1:-1])
            case _Mode.RAW:
                return self._written(text)
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
            return self._written(prefix + text.strip(_JSON_WHITESPACE))
        return self._written(prefix + json.dumps(text, ensure_ascii=False))

    def close(self) -> str:
        """The call ends."""
        end = self.close_argument()
        if self._is_raw:
            return "{}" if self._is_empty else end
        return end + ("}" if self._keys else "{}")

    def _written(self, text: str) -> str:
        self._is_empty = self._is_empty and not text
        return text


def is_json(text: str) -> bool:
    """Whether text is one JSON value; NaN and infinities are not."""
    try:
        json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return False
    return True


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
