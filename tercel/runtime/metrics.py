"""What the engine counts. The server gives it the shape that scrapers read."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from tercel.runtime.proposals import RoundCounts
from tercel.runtime.sequence import FinishReason

_SECONDS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1.0, 2.5, 5.0))
"""0.1 ms to 50 s."""


@dataclass
class Histogram:
    """Observations by bucket; also what is sent to the server."""

    bounds: tuple[float, ...] = _SECONDS
    """Inclusive upper bounds; one more bucket takes the rest."""
    counts: list[int] = field(default_factory=list)
    """Observations of each bucket alone."""
    total: float = 0.0
    """Sum of all observations."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True)
class Usage:
    """The load at one moment."""

    num_running: int
    num_waiting: int
    max_running: int
    """Requests that can run together, after the limits of the cache and of a step."""
    num_pages: int
    num_used_pages: int
    num_slots: int
    num_used_slots: int
    num_preemptions: int
    """Since the start, like all counts of Stats."""


@dataclass
class Counters:
    """Since the start of the engine."""

    num_finished: dict[FinishReason, int] = field(default_factory=dict)
    """`error` counts the requests whose logits were not finite."""
    num_prompt_tokens: int = 0
    """Of requests admitted."""
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    """Fed to the model: prompts, preempted requests once more, and drawn tokens."""
    num_steps: int = 0
    time_to_first_token_s: Histogram = field(default_factory=Histogram)
    time_per_output_token_s: Histogram = field(default_factory=Histogram)
    """Mean over each finished request's tokens after the first."""
    request_s: Histogram = field(default_factory=Histogram)
    """From arrival to the last token."""
    step_s: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True)
class Stats:
    """A snapshot."""

    usage: Usage
    counters: Counters
    program_calls: Mapping[str, int] = field(default_factory=dict)
    """Calls per site, op and implementation, proving which code ran."""
    rounds: RoundCounts | None = None
    """What became of guesses; None: nothing is guessed."""
    forced_acceptance: bool = False
    """Whether guesses are accepted by decree."""


@dataclass
class RequestClock:
    """When things happened to one request, in seconds of one monotonic clock."""

    arrived: float
    first_token: float | None = None
    num_tokens: int = 0

    def tokens(self, count: int, now: float, counters: Counters) -> None:
        """Records `count` new tokens."""
        if count and self.first_token is None:
            self.first_token = now
            counters.time_to_first_token_s.observe(now - self.arrived)
        self.num_tokens += count
        counters.num_generated_tokens += count

    def finished(self, reason: FinishReason, now: float, counters: Counters) -> None:
        """Records the end; an abort says nothing about speed."""
        counters.num_finished[reason] = counters.num_finished.get(reason, 0) + 1
        if reason == "abort" or self.first_token is None:
            return
        counters.request_s.observe(now - self.arrived)
        if self.num_tokens > 1:
            per_token = (now - self.first_token) / (self.num_tokens - 1)
            counters.time_per_output_token_s.observe(per_token)
