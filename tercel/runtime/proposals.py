"""Which guesses a request verifies next: those of a drafter, or of its own text; and how many.

Every decision is made from what was accepted and drafted before, never from a guess that it could
leave out: that keeps the output's law the target's.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from tercel.core.sampling import RowResult

Guesses = tuple[int, ...]

SUFFIX = "suffix"
"""Names the drafter that needs no model."""
SUFFIX_DRAFTS = 7
"""Guesses of it per step, if not chosen."""
WINDOW = 16
"""Rounds over which acceptance is judged."""
LEAST_ACCEPTED = 0.1
"""Mean accepted drafts per round below which a request stops drafting."""
PAUSE = 64
"""Tokens until it tries again."""


class Proposer(Protocol):
    """Where guesses come from."""

    @property
    def drafts_on_device(self) -> int:
        """Guesses that the step is asked for; 0 where they are made here."""
        ...

    def propose(self, token_ids: Sequence[int], latest: RowResult | None, limit: int) -> Guesses:
        """Up to `limit` guesses of what follows `token_ids`, of which the last was drawn by the
        step that gave `latest`."""
        ...


@dataclass(frozen=True)
class DrafterProposer:
    """Guesses that the drafter made in the step before."""

    max_drafts: int
    min_confidence: float = 0.0
    """A guess is verified only if the drafter gives it and all before it at least this chance."""

    @property
    def drafts_on_device(self) -> int:
        return self.max_drafts

    def propose(self, token_ids: Sequence[int], latest: RowResult | None, limit: int) -> Guesses:
        if latest is None:
            return ()
        guesses = latest.drafts[:limit]
        for slot, chance in enumerate(latest.confidence[: len(guesses)]):
            if chance < self.min_confidence:
                return guesses[:slot]
        return guesses


@dataclass(frozen=True)
class SuffixProposer:
    """What followed the same few tokens earlier in prompt or answer; needs no model."""

    longest: int = 6
    """Tokens that are looked for at first, then fewer."""
    shortest: int = 2
    drafts_on_device: int = field(default=0, init=False)

    def propose(self, token_ids: Sequence[int], latest: RowResult | None, limit: int) -> Guesses:
        text = array("q", token_ids)
        for count in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            start = _last(text[-count:], text[:-1])
            if start is not None:
                return tuple(text[start + count : start + count + limit])
        return ()


def _last(wanted: "array[int]", text: "array[int]") -> int | None:
    """Where `wanted` begins for the last time in `text`; whole tokens of a search over bytes."""
    size, needle, end = text.itemsize, wanted.tobytes(), len(text) * text.itemsize
    haystack = text.tobytes()
    while (place := haystack.rfind(needle, 0, end)) >= 0:
        if place % size == 0:
            return place // size
        end = place + len(needle) - 1
    return None


def drafts_per_request(num_requests: int, max_drafts: int, verify_tokens: int) -> int:
    """Of a step with so many decoding requests, which share `verify_tokens`. As many as the next
    power of two would have: steps are captured at those sizes."""
    share = verify_tokens >> max(num_requests - 1, 0).bit_length()
    return max(0, min(max_drafts, share - 1))


@dataclass
class DraftState:
    """What a request remembers of its rounds."""

    latest: RowResult | None = None
    """Of the step before, in which the last known token was drawn."""
    rounds: int = 0
    """Steps that verified drafts."""
    drafted: int = 0
    accepted: int = 0
    recent: list[int] = field(default_factory=list)
    paused_until: int = 0
    """Tokens of the request from which it drafts again."""


@dataclass
class RoundCounts:
    """Over all requests, for metrics."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    at_position: dict[int, int] = field(default_factory=dict)
    """Rounds that accepted the guess at a position, counted from 0."""
    tried_at_position: dict[int, int] = field(default_factory=dict)
    """Rounds that verified a guess there."""

    def add(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(drafted):
            self.tried_at_position[position] = self.tried_at_position.get(position, 0) + 1
        for position in range(accepted):
            self.at_position[position] = self.at_position.get(position, 0) + 1

    def since(self, earlier: "RoundCounts") -> "RoundCounts":
        """What came after `earlier`."""

        def less(now: dict[int, int], then: dict[int, int]) -> dict[int, int]:
            return {position: count - then.get(position, 0) for position, count in now.items()}

        return RoundCounts(
            self.rounds - earlier.rounds,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            less(self.at_position, earlier.at_position),
            less(self.tried_at_position, earlier.tried_at_position),
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round: the accepted guesses and the token after them."""
        return 1 + self.accepted / max(self.rounds, 1)

    @property
    def per_position(self) -> list[float]:
        """Share of the rounds that accepted the guess at each position."""
        rounds = max(self.rounds, 1)
        return [self.at_position.get(p, 0) / rounds for p in range(len(self.tried_at_position))]

    @property
    def conditional(self) -> list[float]:
        """Chance at each position that the guess is accepted, given that those before it are."""
        shares = [1.0, *self.per_position]
        return [now / before if before else 0.0 for before, now in pairwise(shares)]

    def to_dict(self) -> dict[str, int | float | list[float]]:
        """For JSON."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "per_position": self.per_position,
            "conditional": self.conditional,
        }


class Speculation:
    """Decides how many guesses each running request verifies, and remembers what came of it."""

    def __init__(
        self, proposer: Proposer, *, max_drafts: int, verify_tokens: int, adaptive: bool
    ) -> None:
        """
        Args:
            verify_tokens: of a step over all requests; more requests verify fewer drafts each.
            adaptive: whether a request whose guesses are not accepted pauses.
        """
        self._proposer = proposer
        self._max_drafts = max_drafts
        self._verify_tokens = verify_tokens
        self._adaptive = adaptive
        self.counts = RoundCounts()

    def limit(self, num_requests: int) -> int:
        """Drafts per request of a step with so many decoding requests."""
        return drafts_per_request(num_requests, self._max_drafts, self._verify_tokens)

    def wanted(self, num_requests: int) -> int:
        """Guesses that the step's drafter is asked for, for a next step of so many requests."""
        return min(self._proposer.drafts_on_device, self.limit(num_requests))

    def propose(self, token_ids: Sequence[int], state: DraftState, limit: int) -> Guesses:
        if limit < 1 or len(token_ids) < state.paused_until:
            return ()
        return self._proposer.propose(token_ids, state.latest, limit)

    def record(
        self, state: DraftState, result: RowResult, *, num_tokens: int, drafted: int, served: int
    ) -> None:
        """What a step gave a request that has `num_tokens` tokens now, `served` of them new."""
        state.latest = result
        if not drafted or not result.is_finite:
            return
        accepted = min(len(result.tokens) - 1, served)
        state.rounds += 1
        state.drafted += drafted
        state.accepted += accepted
        self.counts.add(drafted, accepted)
        state.recent = [*state.recent, accepted][-WINDOW:]
        is_poor = len(state.recent) == WINDOW and sum(state.recent) < LEAST_ACCEPTED * WINDOW
        if self._adaptive and is_poor:
            state.recent = []
            state.paused_until = num_tokens + PAUSE
