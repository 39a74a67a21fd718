"""The one timer: warm-up, interleaved A B B A rounds, cold L2 on a GPU, medians with spread."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Work = Callable[[], object]
L2_BYTES = 256 << 20
"""Larger than any L2; overwriting this much leaves none of the inputs in it."""


@dataclass(frozen=True)
class Timing:
    """Microseconds over the rounds of one contender."""

    median_us: float
    low_us: float
    """Tenth percentile."""
    high_us: float
    """Ninetieth percentile."""

    @property
    def spread(self) -> float:
        """Relative distance of the percentiles: differences below it are noise."""
        return (self.high_us - self.low_us) / self.median_us

    def per(self, calls: int) -> "Timing":
        """The share of one of `calls` equal calls."""
        return Timing(self.median_us / calls, self.low_us / calls, self.high_us / calls)


def in_graph(calls: Sequence[Work], *, device: str = "cuda") -> Work:
    """The calls as one CUDA graph, so that launches cost what they cost in a decode step; on a
    CPU, one after the other."""
    if torch.device(device).type != "cuda":
        return lambda: [call() for call in calls]
    for call in calls[:2]:
        call()  # first calls compile, which capture forbids
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return partial(_replay, graph, tuple(calls))


def _replay(graph: torch.cuda.CUDAGraph, calls: Sequence[Work]) -> None:
    """A graph knows addresses only: with `calls` their arguments stay where they are."""
    graph.replay()


def interleave(
    contenders: Mapping[str, Work], *, rounds: int = 20, device: str = "cpu"
) -> dict[str, Timing]:
    """Times every contender in each round, forwards in even and backwards in odd rounds, so that
    drift of the machine falls on all alike."""
    measure = _cuda_us if torch.device(device).type == "cuda" else _host_us
    for work in contenders.values():
        work()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for index in range(rounds):
        for name in order if index % 2 == 0 else reversed(order):
            samples[name].append(measure(contenders[name]))
    return {name: _summary(values) for name, values in samples.items()}


def _summary(values: list[float]) -> Timing:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[last // 10], ordered[last - last // 10])


def _host_us(work: Work) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def _cuda_us(work: Work) -> float:
    # Written, then read: lines left dirty would be written back during the measurement.
    torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda").fill_(1).max()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def copy_bandwidth(nbytes: int = 1 << 28, *, device: str = "cpu", rounds: int = 10) -> float:
    """Bytes per second of a large copy, read plus written: the ceiling of the same run."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / _seconds(lambda: target.copy_(source), device, rounds)


def read_bandwidth(nbytes: int = 1 << 28, *, device: str = "cpu", rounds: int = 10) -> float:
    """Bytes per second of a large sum, which only reads."""
    source = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    return nbytes / _seconds(lambda: source.sum(), device, rounds)


def matmul_rate(size: int = 1024, *, device: str = "cpu", rounds: int = 10) -> float:
    """Flops per second of a square bf16 product."""
    x, y = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / _seconds(lambda: x @ y, device, rounds)


def _seconds(work: Work, device: str, rounds: int) -> float:
    return interleave({"it": work}, rounds=rounds, device=device)["it"].median_us * 1e-6
