"""How a row's next token is drawn: host values that travel in the plan to every rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum


@dataclass(frozen=True)
class RowSampling:
    """The defaults draw greedily from the model's own logits.

    The randomness of a token is keyed by (seed, position of the token), so neither the batch that
    a row runs in nor a preemption changes what is drawn.
    """

    seed: int = 0
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: tuple[tuple[int, int], ...] = ()
    """(token, occurrences in the output) of each token of prompt and output that a penalty reads;
    empty where no penalty is set."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token, value added to its logit), each token once; -inf bans it."""
    allowed: bytes | None = None
    """A bit per token of the vocabulary, the lowest bit first: a grammar allows the token; None
    allows all."""
    logprobs: int | None = None
    """How many best tokens to report beside the drawn one; None reports nothing."""

    @property
    def is_filtered(self) -> bool:
        """Whether top_k, top_p or min_p drops tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_edited(self) -> bool:
        """Whether the host has a hand in the row's logits, or reports them."""
        edits = self.history or self.bias or self.allowed is not None
        return bool(edits) or self.logprobs is not None


GREEDY = RowSampling()


class Draws(StrEnum):
    """What drawing the tokens of a step takes, by its most demanding row."""

    GREEDY = "greedy"
    PLAIN = "plain"
    FILTERED = "filtered"

    @classmethod
    def of(cls, samplings: Iterable[RowSampling]) -> "Draws":
        held = tuple(samplings)
        if any(item.is_filtered for item in held):
            return cls.FILTERED
        return cls.PLAIN if any(item.temperature > 0 for item in held) else cls.GREEDY


class Stream(IntEnum):
    """Independent random numbers of a request at one position.

    The target's own draws are keyed by the position of the token drawn, so that they are those of
    plain decoding. Everything about drafts is keyed by the position of the round's anchor and,
    added to the stream, by the slot: a slot that is rejected is drafted anew by a later round, and
    block verification has looked at its numbers by then, so they must not come back.
    """

    TARGET = 0
    DRAFT = 1 << 8
    ACCEPT = 2 << 8
    RESIDUAL = 3 << 8
    """The token after the accepted ones; of a round without drafts it is the target's own draw."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one drawn token, from the logits before penalties and temperature."""

    token: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most likely first."""


@dataclass(frozen=True)
class RowResult:
    """What a row that samples gave."""

    request_id: str
    tokens: tuple[int, ...]
    """Accepted drafts and the token after them."""
    is_finite: bool = True
    """False: the logits after the accepted drafts hold NaN or infinity, and no token was drawn."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where asked for."""
    drafts: tuple[int, ...] = ()
    """Guesses of what follows the last of the tokens."""
    confidence: tuple[float, ...] = ()
    """The drafter's estimate that each guess is accepted if those before it are; empty without a
    confidence head."""


@dataclass(frozen=True)
class StepResult:
    """One entry per sampling row of the plan, in its order."""

    rows: tuple[RowResult, ...]
