"""The engine's counts in Prometheus' text form, named as in vLLM with the prefix `tercel:`."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tercel.runtime.metrics import Histogram, Stats
from tercel.runtime.proposals import RoundCounts

_LABELS = ("model_name",)


def exposition(model: str, stats: Stats | None) -> bytes:
    """What a scraper reads. `stats` of None: the engine is loading or has died."""
    registry = CollectorRegistry()
    registry.register(_Collector(model, stats))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, model: str, stats: Stats | None) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_ready", "Whether requests are served.", self._stats is not None)
        if self._stats is not None:
            yield from self._load(self._stats)
            yield from self._counts(self._stats)
            yield from self._times(self._stats)
            if self._stats.rounds is not None:
                yield from self._rounds(self._stats.rounds)
                forced = self._stats.forced_acceptance
                text = "Guesses are accepted by decree: the text is not the model's."
                yield self._gauge("spec_decode_forced_acceptance", text, forced)

    def _load(self, stats: Stats) -> Iterator[Metric]:
        usage = stats.usage
        used_share = usage.num_used_pages / usage.num_pages
        for name, text, value in (
            ("num_requests_running", "Requests that take part in steps.", usage.num_running),
            ("num_requests_waiting", "Requests that wait for pages or slots.", usage.num_waiting),
            ("max_requests_running", "Requests that can run together.", usage.max_running),
            ("kv_cache_usage_perc", "Used share of the cache pages, 1 is full.", used_share),
            ("kda_slots_used", "KDA state slots in use.", usage.num_used_slots),
            ("kda_slots", "KDA state slots.", usage.num_slots),
        ):
            yield self._gauge(name, text, value)

    def _counts(self, stats: Stats) -> Iterator[Metric]:
        counts = stats.counters
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of admitted requests.", counts.num_prompt_tokens),
            ("generation_tokens", "Generated tokens.", counts.num_generated_tokens),
            ("computed_tokens", "Tokens fed to the model.", counts.num_computed_tokens),
            ("engine_steps", "Steps of the engine.", counts.num_steps),
            ("num_preemptions", "Requests that gave up their cache.", stats.usage.num_preemptions),
        ):
            yield self._counter(name, text, value)
        finished = CounterMetricFamily(
            "tercel:request_success",
            "Requests that ended, by reason.",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason, count in counts.num_finished.items():
            finished.add_metric((self._model, reason), count)
        yield finished
        calls = CounterMetricFamily(
            "tercel:program_calls", "Calls of implementations.", labels=(*_LABELS, "call")
        )
        for name, count in stats.program_calls.items():
            calls.add_metric((self._model, name), count)
        yield calls

    def _rounds(self, rounds: RoundCounts) -> Iterator[Metric]:
        for name, text, value in (
            ("spec_decode_num_drafts", "Steps of requests that verified guesses.", rounds.rounds),
            ("spec_decode_num_draft_tokens", "Guesses verified.", rounds.drafted),
            ("spec_decode_num_accepted_tokens", "Guesses that became tokens.", rounds.accepted),
        ):
            yield self._counter(name, text, value)
        yield self._gauge(
            "spec_decode_acceptance_length",
            "Mean tokens of a step of a request that verifies guesses.",
            rounds.acceptance_length,
        )
        for name, text, values in (
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Rounds that accepted the guess at a position.",
                rounds.at_position,
            ),
            (
                "spec_decode_num_draft_tokens_per_pos",
                "Rounds that verified a guess at a position.",
                rounds.tried_at_position,
            ),
        ):
            family = CounterMetricFamily(f"tercel:{name}", text, labels=(*_LABELS, "position"))
            for position, count in values.items():
                family.add_metric((self._model, str(position)), count)
            yield family
        share = GaugeMetricFamily(
            "tercel:spec_decode_conditional_acceptance",
            "Chance that a guess is accepted when those before it are.",
            labels=(*_LABELS, "position"),
        )
        for position, chance in enumerate(rounds.conditional):
            share.add_metric((self._model, str(position)), chance)
        yield share

    def _times(self, stats: Stats) -> Iterator[Metric]:
        counts = stats.counters
        for name, text, histogram in (
            (
                "time_to_first_token",
                "From arrival to the first token.",
                counts.time_to_first_token_s,
            ),
            (
                "time_per_output_token",
                "Mean time per token after the first.",
                counts.time_per_output_token_s,
            ),
            ("e2e_request_latency", "From arrival to the last token.", counts.request_s),
            ("engine_step", "One step of the engine.", counts.step_s),
        ):
            yield self._histogram(f"{name}_seconds", text, histogram)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tercel:{name}", text, labels=_LABELS)
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tercel:{name}", text, labels=_LABELS)
        family.add_metric((self._model,), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"tercel:{name}", text, labels=_LABELS)
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric((self._model,), buckets, histogram.total)
        return family
