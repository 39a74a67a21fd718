"""What a grammar has to offer a request: the tokens that may come next, forwards and back."""

from typing import Protocol


class Matcher(Protocol):
    """The state of one request's grammar after the tokens so far. The scheduler walks it along the
    drafts of a step and back again, so that only tokens of the answer move it for good."""

    def mask(self) -> bytes:
        """A bit per token of the vocabulary, the lowest bit first: whether it may come next."""
        ...

    def allows(self, token: int) -> bool: ...

    def advance(self, token: int) -> None:
        """`token` comes next; it is one that the mask allows."""
        ...

    def roll_back(self, count: int) -> None:
        """Undoes the last `count` advances."""
        ...
