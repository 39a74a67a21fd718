"""One step of the engine, as host integers. Ranks receive the same plan and decide nothing else.

Rows are [prefill | verify]: a decode row is a verify row without drafts.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from tercel.core.sampling import GREEDY, Draws, RowSampling

SINK = 0
"""Page and slot of padded rows: they write there and nobody reads it."""


@dataclass(frozen=True)
class Row:
    """One request's share of a step."""

    request_id: str
    tokens: tuple[int, ...]
    """Token ids fed in this step, at positions context_len, context_len + 1, ..."""
    context_len: int
    """Tokens of this request that the caches hold before the step."""
    slot: int
    """KDA slot; the sink never belongs to a request."""
    pages: tuple[int, ...]
    """Page ids that cover context_len + len(tokens) positions."""
    samples: bool = True
    """Whether a next token is drawn after this row: false for all but the last prefill chunk."""
    sampling: RowSampling = GREEDY
    """How it is drawn."""
    num_drafts: int = 0
    """Of a verify row: tokens after the first that are drafts. What follows them brings the row to
    the step's width and is not read."""
    after_drafts: tuple[RowSampling, ...] = ()
    """How the token after each draft is drawn, where that depends on the drafts; empty: as
    `sampling`."""
    pending: int = 0
    """Drafts of the request's last step that were accepted: its KDA state lacks them still."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def seq_len(self) -> int:
        """Cached tokens after the step, rejected drafts included."""
        return self.context_len + len(self.tokens)

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.tokens[1 : 1 + self.num_drafts]

    def sampling_at(self, position: int) -> RowSampling:
        """How the token at `position`, after the row's tokens before it, is drawn."""
        draft = position - self.context_len - 2
        return self.after_drafts[draft] if 0 <= draft < len(self.after_drafts) else self.sampling


@dataclass(frozen=True)
class StepPlan:
    """What every rank runs next."""

    prefill: tuple[Row, ...] = ()
    verify: tuple[Row, ...] = ()
    fresh_pages: tuple[int, ...] = ()
    """Pages allotted since the last step, cleared before this one runs: masked attention still
    multiplies what an earlier owner left, and 0 * NaN is NaN. A slot needs no clearing, since a row
    with context_len 0 ignores what its slot holds."""
    num_drafts: int = 0
    """Guesses wanted of each request that samples, for its next step."""

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

    @property
    def sampled(self) -> tuple[Row, ...]:
        """The rows that sample: prefill rows, then all verify rows."""
        return tuple(row for row in self.prefill if row.samples) + self.verify

    @property
    def kind(self) -> Draws:
        """Of the draws of all its rows."""
        return Draws.of(row.sampling for row in self.sampled)

    @property
    def is_edited(self) -> bool:
        """Whether the host has a hand in the logits of a row, or reports them."""
        return any(row.after_drafts or row.sampling.is_edited for row in self.sampled)

    @property
    def draws(self) -> tuple[tuple[Row, int], ...]:
        """(row, position of the token drawn) for each row of the logits, in their order."""
        last = [(row, row.seq_len) for row in self.prefill if row.samples]
        every = [
            (row, position)
            for row in self.verify
            for position in range(row.context_len + 1, row.seq_len + 1)
        ]
        return tuple(last + every)

    def padded(self, rows: int, width: int, page_size: int) -> "StepPlan":
        """With verify rows brought to `width` tokens and added up to `rows`. Added rows read and
        write nothing but the sinks; added tokens lie past the end of their row."""
        pad = Row("", (), context_len=0, slot=SINK, pages=())
        verify = self.verify + (pad,) * (rows - len(self.verify))
        return replace(self, verify=tuple(_widened(row, width, page_size) for row in verify))


def _widened(row: Row, width: int, page_size: int) -> Row:
    missing = -(-(row.context_len + width) // page_size) - len(row.pages)
    if row.num_tokens == width and missing <= 0:  # as most are: a copy takes longer than the check
        return row
    tokens = row.tokens + (0,) * (width - row.num_tokens)
    return replace(row, tokens=tokens, pages=row.pages + (SINK,) * missing)


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
