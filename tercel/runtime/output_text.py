"""The text of one request: tokens to characters, cut before a stop string."""

from collections.abc import Sequence

from tercel.runtime.tokenizer import Detokenizer, Tokenizer


class StopStrings:
    """Finds the first stop string to become complete, however the text is split into pushes.

    Text that may still turn out to begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now. After a match, the text before it, then nothing."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop, start in self._matches(text)]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        certain = len(text) - self._num_held(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _matches(self, text: str) -> list[tuple[str, int]]:
        found = [(stop, text.find(stop)) for stop in self._stops]
        return [(stop, start) for stop, start in found if start >= 0]

    def _num_held(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        sizes = range(longest, 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._stops)), 0)


class OutputText:
    """Turns one request's tokens into text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int) -> None:
        """The first `min_tokens` tokens cannot complete a stop string."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._num_unstoppable = min_tokens

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        text = self._detokenizer.push([token])
        if self._num_unstoppable > 0:
            self._num_unstoppable -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """What is left at the end: text held back, and U+FFFD for an unfinished character."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
