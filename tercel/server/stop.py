"""Stop strings in the answer of a chat; thinking and tool calls never match them."""

from collections.abc import Sequence


class StopStrings:
    """Text up to the first stop string. Text that may begin one is held back until it is clear."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_reached = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is safe to send. `may_stop=False` lets stop strings pass as text."""
        if self.is_reached:
            return ""
        held, self._held = self._held + text, ""
        if not may_stop:
            return held
        starts = [start for stop in self._stops if (start := held.find(stop)) >= 0]
        if starts:
            self.is_reached = True
            return held[: min(starts)]
        safe = len(held) - self._num_undecided(held)
        self._held = held[safe:]
        return held[:safe]

    def flush(self) -> str:
        """What was held back; the output is over."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)
