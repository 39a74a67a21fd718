"""One step of the engine, as host integers. Ranks receive the same plan and decide nothing else.

Rows are [prefill | verify]: a decode row is a verify row without drafts.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Row:
    """One request's share of a step."""

    request_id: str
    tokens: tuple[int, ...]
    """Token ids fed in this step, at positions context_len, context_len + 1, ..."""
    context_len: int
    """Tokens of this request that the caches hold before the step."""
    slot: int
    """KDA slot; 0 is the sink and never belongs to a request."""
    pages: tuple[int, ...]
    """Page ids that cover context_len + len(tokens) positions; 0 is the sink."""
    samples: bool = True
    """Whether a next token is drawn after this row: false for all but the last prefill chunk."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def seq_len(self) -> int:
        """Cached tokens after the step."""
        return self.context_len + len(self.tokens)


@dataclass(frozen=True)
class StepPlan:
    """What every rank runs next."""

    prefill: tuple[Row, ...] = ()
    verify: tuple[Row, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.prefill + self.verify

    @property
    def num_prefill_tokens(self) -> int:
        return sum(row.num_tokens for row in self.prefill)

    @property
    def num_verify_tokens(self) -> int:
        return sum(row.num_tokens for row in self.verify)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_verify_tokens

    @property
    def tokens_per_verify_row(self) -> int:
        """1 + drafts; the same for every verify row of a step."""
        return self.verify[0].num_tokens if self.verify else 0


class StepClass(StrEnum):
    """The kinds of step that a program is resolved for."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    MIXED = "mixed"


@dataclass(frozen=True)
class TokenLimits:
    """The part of a target's row that classifies steps."""

    decode_max_tokens: int = 64
    """Tokens up to which a step without prefill rows runs the decode implementations."""


def classify(plan: StepPlan, limits: TokenLimits) -> StepClass:
    """The class of `plan`: a pure function of host integers, equal on every rank."""
    if plan.prefill:
        return StepClass.MIXED if plan.verify else StepClass.PREFILL
    if plan.num_tokens > limits.decode_max_tokens:
        return StepClass.MIXED
    return StepClass.DECODE if plan.tokens_per_verify_row == 1 else StepClass.VERIFY
