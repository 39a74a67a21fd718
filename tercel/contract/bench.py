"""What is timed of an op and beside what, and the timing of one cell."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch

from tercel.contract.check import packed
from tercel.contract.contract import Cell
from tercel.contract.draw import draw
from tercel.contract.op import Op
from tercel.contract.receipt import CellTime
from tercel.contract.timing import Timing, Work, in_graph, interleave
from tercel.errors import ContractError

DTYPE = torch.bfloat16
COLD_BYTES = 192 << 20
"""The calls of one graph read at least this much, several times what an L2 holds."""
LONG_BYTES = 2 << 30
"""The calls of a graph need not read more, which takes long enough for its launch not to count."""
CALLS = (16, 96)
"""Fewest and most calls in one graph, memory and LONG_BYTES permitting."""
COPIES_BYTES = 24 << 30
"""What the arguments of all calls may take together."""
ROUNDS = (5, 20)
TRIES = 3
"""Replays of a peer before it is timed."""
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
    long: tuple[Cell, ...] = ()
    """Timed too, and certified by one call beside the portable form in fp64: the reference would
    take minutes."""
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions of the op's arguments, from packages that are always there."""
    peers: Mapping[str, Callable[..., Work]] = field(default_factory=dict)
    """Public kernels: prepare(**arguments) -> a call without arguments that can be captured. What
    an engine does once, such as packing weights, is done by `prepare`, which raises ImportError
    where the package is absent."""
    goals: tuple[Goal, ...] = ()
    """The first that covers a cell holds; others follow from bytes and bandwidth."""

    @property
    def every_cell(self) -> tuple[Cell, ...]:
        return (*self.cells, *self.long)

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
    peers: Sequence[str] = (),
    not_run: Mapping[str, str] = MappingProxyType({}),
    device: str = "cuda",
    rounds: tuple[int, int] = ROUNDS,
) -> CellTime:
    """The implementation beside its baselines and `peers`, all in the same rounds: graphs of calls
    on distinct cold inputs. `not_run` says of other peers why they are not there."""
    bench, chosen = bench_of(op), op.implementation(implementation)
    drawn = draw(op, cell, dtype=DTYPE, device=device)
    cost = op.contract.cost_of(drawn)
    footprint = sum(x.nbytes for x in drawn.values() if isinstance(x, torch.Tensor))
    calls = _calls(cost.bytes, footprint)
    plain = [_copy(drawn) for _ in range(calls)]
    ours = [partial(chosen.run, **packed(op, chosen, arguments, DTYPE)) for arguments in plain]
    graphs = {implementation: in_graph(ours, device=device)}
    for name, baseline in bench.baselines.items():
        graphs[name] = in_graph([partial(baseline, **each) for each in plain], device=device)
    for name in peers:
        prepared = [bench.peers[name](**_copy(arguments)) for arguments in plain]
        graphs[name] = in_graph(prepared, device=device)
    timings = _timed(graphs, calls, rounds, device)
    own = timings.pop(implementation)
    medians = {name: round(timing.median_us, 3) for name, timing in timings.items()}
    absent = dict.fromkeys(bench.peers, "not asked for")
    return CellTime(
        median_us=round(own.median_us, 3),
        low_us=round(own.low_us, 3),
        high_us=round(own.high_us, 3),
        bytes=cost.bytes,
        flops=cost.flops,
        baselines_us={name: medians[name] for name in bench.baselines},
        peers_us={name: medians[name] for name in peers},
        not_run={name: not_run.get(name, why) for name, why in absent.items() if name not in peers},
    )


def try_peer(op: Op[..., Any], cell: Cell, name: str, *, device: str = "cuda") -> None:
    """Calls a peer as timing does, in a graph, so that what it compiles is there and what it does
    wrong shows. Raises whatever it raises; ContractError where its package is not installed."""
    try:
        call = bench_of(op).peers[name](**draw(op, cell, dtype=DTYPE, device=device))
    except ImportError as error:
        raise ContractError(f"{error.name or error} is not installed") from error
    replay = in_graph([call], device=device)
    for _ in range(TRIES):
        replay()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _calls(nbytes: int, footprint: int) -> int:
    """As many as cold inputs need, and as fit into memory."""
    fewest = min(CALLS[0], -(-LONG_BYTES // nbytes))
    wanted = min(max(-(-COLD_BYTES // nbytes), fewest), CALLS[1])
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
