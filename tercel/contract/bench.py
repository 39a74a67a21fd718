"""What is timed of an op and beside what, and the timing of one cell."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from tercel.contract.check import draw, packed
from tercel.contract.contract import Cell
from tercel.contract.op import Op
from tercel.contract.receipt import CellTime
from tercel.contract.timing import Timing, Work, in_graph, interleave

DTYPE = torch.bfloat16
COLD_BYTES = 192 << 20
"""The calls of one graph read at least this much, several times what an L2 holds."""
CALLS = (16, 96)
"""Fewest and most calls in one graph, memory permitting."""
COPIES_BYTES = 24 << 30
"""What the arguments of all calls may take together."""
ROUNDS = (5, 20)
CONTENDER_US = 4e5
"""A contender is timed for about this long, within the limits of ROUNDS."""


@dataclass(frozen=True, init=False)
class Goal:
    """Microseconds that the cells of these sizes should not exceed."""

    us: float | Literal["best peer"]
    sizes: Mapping[str, Any]

    def __init__(self, us: float | Literal["best peer"], **sizes: Any) -> None:
        object.__setattr__(self, "us", us)
        object.__setattr__(self, "sizes", sizes)

    def covers(self, cell: Cell) -> bool:
        return all(cell.get(name) == size for name, size in self.sizes.items())


@dataclass(frozen=True)
class Bench:
    """What is timed of an op, and beside what. Bytes come from the contract."""

    cells: tuple[Cell, ...]
    """Certified too: only what is right is timed."""
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions of the op's arguments, from packages that are always there."""
    peers: Mapping[str, Callable[..., Work]] = field(default_factory=dict)
    """Public kernels: prepare(**arguments) -> a call without arguments that can be captured. What
    an engine does once, such as packing weights, is done by `prepare`, which raises ImportError
    where the package is absent."""
    goals: tuple[Goal, ...] = ()
    """The first that covers a cell holds; others follow from bytes and bandwidth."""

    def goal_of(self, cell: Cell) -> float | Literal["best peer"] | None:
        return next((goal.us for goal in self.goals if goal.covers(cell)), None)


def bench_of(op: Op[..., Any]) -> Bench:
    """The `BENCH` of the op's folder."""
    found: Bench = importlib.import_module(f"{op.folder}.bench").BENCH
    return found


def time_cell(
    op: Op[..., Any],
    cell: Cell,
    implementation: str,
    *,
    peers: bool = False,
    device: str = "cuda",
    rounds: tuple[int, int] = ROUNDS,
) -> CellTime:
    """The implementation beside its baselines: graphs of calls on distinct cold inputs."""
    bench, chosen = bench_of(op), op.implementation(implementation)
    drawn = draw(op, cell, dtype=DTYPE, device=device)
    cost = op.contract.cost_of(drawn)
    footprint = sum(x.nbytes for x in drawn.values() if isinstance(x, torch.Tensor))
    calls = _calls(cost.bytes, footprint)
    plain = [_copy(drawn) for _ in range(calls)]
    graphs: dict[str, Work] = {}
    ours = [partial(chosen.run, **packed(op, chosen, arguments, DTYPE)) for arguments in plain]
    graphs[implementation] = in_graph(ours, device=device)
    for name, baseline in bench.baselines.items():
        graphs[name] = in_graph([partial(baseline, **each) for each in plain], device=device)
    not_run = dict.fromkeys(bench.peers, "not asked for")
    if peers:
        not_run = _add_peers(graphs, bench.peers, plain, device)
    timings = _timed(graphs, calls, rounds, device)
    own = timings.pop(implementation)
    medians = {name: round(timing.median_us, 3) for name, timing in timings.items()}
    return CellTime(
        median_us=round(own.median_us, 3),
        low_us=round(own.low_us, 3),
        high_us=round(own.high_us, 3),
        bytes=cost.bytes,
        flops=cost.flops,
        baselines_us={name: medians[name] for name in bench.baselines},
        peers_us={name: medians[name] for name in bench.peers if name in medians},
        not_run=not_run,
    )


def warm_peers(op: Op[..., Any], cell: Cell, *, device: str = "cuda") -> None:
    """Compiles what the peers of `cell` launch, so that timing finds it in their caches."""
    drawn = draw(op, cell, dtype=DTYPE, device=device)
    for prepare in bench_of(op).peers.values():
        try:
            prepare(**_copy(drawn))()
        except Exception:
            continue  # timing says what is wrong with it


def _add_peers(
    graphs: dict[str, Work],
    peers: Mapping[str, Callable[..., Work]],
    plain: Sequence[Mapping[str, Any]],
    device: str,
) -> dict[str, str]:
    """The peers that are not there, or fail, and why."""
    absent = {}
    for name, prepare in peers.items():
        try:
            calls = [prepare(**_copy(arguments)) for arguments in plain]
            graphs[name] = in_graph(calls, device=device)
        except ImportError as error:
            absent[name] = f"{error.name or error} is not installed"
        except Exception as error:
            absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return absent


def _calls(nbytes: int, footprint: int) -> int:
    """As many as cold inputs need, and as fit into memory."""
    wanted = min(max(-(-COLD_BYTES // nbytes), CALLS[0]), CALLS[1])
    return max(1, min(wanted, COPIES_BYTES // max(footprint, 1)))


def _timed(
    graphs: Mapping[str, Work], calls: int, rounds: tuple[int, int], device: str
) -> dict[str, Timing]:
    """Per call; slow contenders are timed in fewer rounds."""
    once = interleave(graphs, rounds=1, device=device)
    slowest = max(timing.median_us for timing in once.values())
    count = min(max(int(CONTENDER_US / slowest), rounds[0]), rounds[1])
    timings = interleave(graphs, rounds=count, device=device)
    return {name: timing.per(calls) for name, timing in timings.items()}


def _copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
