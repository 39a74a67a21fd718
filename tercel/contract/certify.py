"""Certifies one implementation on this device: cells, sequences, replay, then time."""

import datetime
import importlib
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tercel.contract.check import check_cell, check_replay, check_sequence, draw, packed
from tercel.contract.compare import Error
from tercel.contract.contract import Cell
from tercel.contract.op import Op
from tercel.contract.receipt import CellResult, Receipt, content_hash
from tercel.contract.timing import Timing, in_graph, interleave
from tercel.core.arch import Arch

DTYPES = (torch.bfloat16, torch.float32)
SEQUENCE_STEPS = 4
COLD_BYTES = 192 << 20
"""The calls of one graph read at least this much, several times what an L2 holds."""
CALLS = (16, 96)
"""Fewest and most calls in one graph."""


@dataclass(frozen=True)
class Bench:
    """What is timed of an op, and beside what. Bytes come from the contract."""

    cells: tuple[Cell, ...]
    """Certified too: only what is right is timed."""
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions of the op's arguments."""


def bench_of(op: Op[..., Any]) -> Bench:
    """The `BENCH` of the op's folder."""
    found: Bench = importlib.import_module(f"{op.folder}.bench").BENCH
    return found


def certify(
    op: Op[..., Any],
    implementation: str,
    arch: Arch,
    *,
    copy_bytes_per_s: float,
    device: str = "cuda",
    rounds: int = 20,
) -> Receipt:
    """The receipt of one implementation. Raises CheckFailed at the first cell that is wrong."""
    bench = bench_of(op)
    cells = (*op.contract.cells, *bench.cells)
    errors = {str(cell): _check(op, cell, implementation, device) for cell in cells}
    timed = {
        str(cell): _time(op, cell, implementation, bench, rounds=rounds, device=device)
        for cell in bench.cells
    }
    return Receipt(
        op=op.name,
        implementation=implementation,
        arch=arch,
        world_size=1,
        content_hash=content_hash(op, implementation),
        ran=True,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else device,
        versions=tool_versions(),
        cells=tuple(_result(name, error, timed.get(name)) for name, error in errors.items()),
        copy_bytes_per_s=copy_bytes_per_s,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _check(op: Op[..., Any], cell: Cell, implementation: str, device: str) -> Error:
    """The errors in bf16, after every check in every dtype."""
    reports = [check_cell(op, cell, implementation, dtype=d, device=device) for d in DTYPES]
    if op.contract.written:
        for dtype in DTYPES:
            check_sequence(
                op, cell, implementation, steps=SEQUENCE_STEPS, dtype=dtype, device=device
            )
    check_replay(op, cell, implementation, dtype=DTYPES[0], device=device)
    return reports[0].worst


@dataclass(frozen=True)
class _Timed:
    bytes: int
    timings: Mapping[str, Timing]


def _time(
    op: Op[..., Any], cell: Cell, implementation: str, bench: Bench, *, rounds: int, device: str
) -> _Timed:
    """The implementation beside its baselines: graphs of calls on distinct cold inputs."""
    chosen = op.implementation(implementation)
    drawn = draw(op, cell, dtype=DTYPES[0], device=device)
    cost = op.contract.cost_of(drawn)
    calls = min(max(-(-COLD_BYTES // cost.bytes), CALLS[0]), CALLS[1])
    plain = [_copy(drawn) for _ in range(calls)]
    ours = [packed(op, chosen, arguments, DTYPES[0]) for arguments in plain]
    graphs = {implementation: _graph(chosen.run, ours, device)}
    for name, baseline in bench.baselines.items():
        graphs[name] = _graph(baseline, plain, device)
    timings = interleave(graphs, rounds=rounds, device=device)
    return _Timed(cost.bytes, {name: timing.per(calls) for name, timing in timings.items()})


def _graph(
    run: Callable[..., Any], sets: Sequence[Mapping[str, Any]], device: str
) -> Callable[[], object]:
    return in_graph([partial(run, **arguments) for arguments in sets], device=device)


def _copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def _result(cell: str, error: Error, timed: _Timed | None) -> CellResult:
    errors = (round(error.element_ulps, 4), round(error.rms_ulps, 4))
    if timed is None:
        return CellResult(cell, *errors)
    medians = {name: round(timing.median_us, 3) for name, timing in timed.timings.items()}
    own = next(iter(timed.timings.values()))
    return CellResult(
        cell,
        *errors,
        median_us=medians.pop(next(iter(medians))),
        low_us=round(own.low_us, 3),
        high_us=round(own.high_us, 3),
        bytes=timed.bytes,
        baselines_us=medians,
    )


def tool_versions() -> dict[str, str]:
    """What a receipt records of the software that it was made with."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        versions["triton"] = version("triton")
    return versions
