"""Token ids to text and markers.

A marker begins with a real control token, never with its spelling. What a model gets wrong is
accepted where it cannot be text: the <|sep|> of a marker may be spelled with ordinary tokens, or
be missing before the next control token.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tercel.runtime.tokenizer import CLOSE, OPEN, SEP, Detokenizer, Tokenizer

TAGS = ("think", "response", "tools", "call", "argument", "json", "message")

_MAX_HEADER_CHARS = 200
_SEP_PREFIX = "(?:" + "|".join(re.escape(SEP[:end]) for end in range(len(SEP), 0, -1)) + ")?"
# A header with the quoted values left out: what may follow the tag, up to a spelled separator.
_OPEN_REST = re.compile(rf"(?:\s[\s\w=-]*)?(?P<sep>{_SEP_PREFIX})")
_CLOSE_REST = re.compile(rf"\s*(?P<sep>{_SEP_PREFIX})")
_TAG = re.compile(r"\s*([a-z]*)")
_ATTRIBUTE = re.compile(r'\s([\w-]+)="([^"]*)')


@dataclass(frozen=True)
class Text:
    """Text outside of any marker; complete UTF-8."""

    text: str


@dataclass(frozen=True)
class Open:
    """An opening marker."""

    tag: str
    attributes: Mapping[str, str]


@dataclass(frozen=True)
class Close:
    """A closing marker."""

    tag: str


@dataclass(frozen=True)
class End:
    """A stop token."""


Lexeme = Text | Open | Close | End


class Lexer:
    """Feeds on token ids, one by one; holds back text that may belong to a marker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._controls = {tokenizer.encode_special(name): name for name in (OPEN, CLOSE, SEP)}
        self._stop_ids = tokenizer.stop_ids
        self._header: _Header | None = None

    def push(self, token_id: int) -> Iterator[Lexeme]:
        """The lexemes that became complete with this id."""
        if token_id not in self._controls and token_id not in self._stop_ids:
            yield from self._text(self._detokenizer.push([token_id]))
            return
        yield from self._text(self._detokenizer.flush())
        control = self._controls.get(token_id)
        if self._header is not None:
            yield self._header.marker() or Text(self._header.literal)
            self._header = None
        if control in (OPEN, CLOSE):
            self._header = _Header(control)
        elif control is None:
            yield End()

    def flush(self) -> Iterator[Lexeme]:
        """The text left at the end of the output; an unfinished marker is dropped."""
        yield from self._text(self._detokenizer.flush())
        self._header = None

    def _text(self, text: str) -> Iterator[Lexeme]:
        for position, char in enumerate(text):
            if self._header is None:
                yield Text(text[position:])
                return
            self._header.push(char)
            if self._header.is_ended or not self._header.is_possible:
                yield self._header.marker() or Text(self._header.literal)
                self._header = None


@dataclass
class _Header:
    """The text after <|open|> or <|close|>: a tag and, if it opens, attributes."""

    control: str
    _chars: list[str] = field(default_factory=list)
    _unquoted: str = ""
    _is_quoted: bool = False

    def push(self, char: str) -> None:
        self._chars.append(char)
        if char == '"' and self.control == OPEN:
            self._is_quoted = not self._is_quoted
        elif not self._is_quoted:
            self._unquoted += char

    @property
    def is_possible(self) -> bool:
        """Whether the text so far can begin a header."""
        if self._is_quoted:
            return True
        if len(self._unquoted) > _MAX_HEADER_CHARS:
            return False
        tag, rest = self._split()
        if not rest:
            return any(known.startswith(tag) for known in TAGS)
        return tag in TAGS and self._rest_pattern.fullmatch(rest) is not None

    @property
    def is_ended(self) -> bool:
        """Whether the header ends in a spelled separator."""
        return not self._is_quoted and self._unquoted.endswith(SEP)

    @property
    def literal(self) -> str:
        """The header as text, for when it is none."""
        return self.control + "".join(self._chars)

    def marker(self) -> Open | Close | None:
        """The marker that this header is, or None if it is none."""
        tag, _ = self._split()
        if tag not in TAGS or not self.is_possible:
            return None
        if self.control == CLOSE:
            return Close(tag)
        attributes = _ATTRIBUTE.findall("".join(self._chars))
        return Open(tag, {key: _unescape(value) for key, value in attributes})

    def _split(self) -> tuple[str, str]:
        match = _TAG.match(self._unquoted)
        assert match is not None
        return match[1], self._unquoted[match.end() :]

    @property
    def _rest_pattern(self) -> re.Pattern[str]:
        return _OPEN_REST if self.control == OPEN else _CLOSE_REST


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
