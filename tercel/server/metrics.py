"""Prometheus metrics, named as in vLLM with the prefix `tercel:`."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = tuple(4**power for power in range(11))


class Metrics:
    """The metrics of one server."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._gauges: dict[str, Gauge] = {}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.finished = Counter(
            "tercel:request_success",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Mean time per token after the first.", _SECONDS
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens per request.", _TOKENS
        )

    @contextmanager
    def track(self) -> "Iterator[Track]":
        """Times one request; it counts as aborted unless `finish_reason` is set inside."""
        track = Track(self)
        try:
            yield track
        finally:
            track.finish()

    def count_finished(self, reason: str) -> None:
        """One more request that ended."""
        self.finished.labels(self._model, reason).inc()

    def exposition(self, stats: Mapping[str, float]) -> bytes:
        """The text that Prometheus reads; `stats` are the engine's own figures of this moment."""
        for name, value in stats.items():
            if name not in self._gauges:
                help_text = name.replace("_", " ").capitalize() + "."
                self._gauges[name] = Gauge(
                    f"tercel:{name}", help_text, ("model_name",), registry=self._registry
                )
            self._gauges[name].labels(self._model).set(value)
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"tercel:{name}", text, ("model_name",), registry=self._registry)
        return counter.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"tercel:{name}", text, ("model_name",), registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model)


class Track:
    """The clock and the token counts of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._prompt_tokens = 0
        self.completion_tokens = 0
        self.finish_reason = "abort"

    def add(self, prompt_tokens: int, new_tokens: int) -> None:
        """An output of the engine arrived."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._prompt_tokens = prompt_tokens
            self._metrics.prompt_tokens.inc(prompt_tokens)
            self._metrics.time_to_first_token.observe(now - self._start)
        self._last = now
        self.completion_tokens += new_tokens
        self._metrics.generation_tokens.inc(new_tokens)

    def finish(self) -> None:
        """The request is over."""
        metrics = self._metrics
        metrics.count_finished(self.finish_reason)
        metrics.latency.observe(self._last - self._start)
        metrics.request_prompt_tokens.observe(self._prompt_tokens)
        metrics.request_generation_tokens.observe(self.completion_tokens)
        if self._first is not None and self.completion_tokens > 1:
            gap = (self._last - self._first) / (self.completion_tokens - 1)
            metrics.time_per_output_token.observe(gap)
