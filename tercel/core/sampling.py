"""How a row's next token is drawn: host values that travel in the plan to every rank."""

from dataclasses import dataclass


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
    logprobs: int | None = None
    """How many best tokens to report beside the drawn one; None reports nothing."""

    @property
    def is_filtered(self) -> bool:
        """Whether top_k, top_p or min_p drops tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


GREEDY = RowSampling()


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
    """Accepted tokens, in order; empty if not `is_finite`."""
    is_finite: bool = True
    """False: the logits hold NaN or infinity, and no token was drawn."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where asked for."""


@dataclass(frozen=True)
class StepResult:
    """One entry per sampling row of the plan, in its order."""

    rows: tuple[RowResult, ...]
