"""docs/benchmarks/h200.md and its plots, from the receipts in the op folders and from h200.json.

The page holds nothing that a machine did not measure; `tercel certify` and the programs named below
write what it is made from.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from benchmarks import svg
from benchmarks.gpu_sections import sections, table
from tercel.contract import PLAIN, Cell
from tercel.contract.bench import bench_of
from tercel.contract.goals import FIXED_US, goal_us, roof_us
from tercel.contract.receipt import (
    Ceilings,
    CellResult,
    CellTime,
    Receipt,
    Status,
    receipts_of,
    status,
)
from tercel.core.arch import Arch
from tercel.ops.catalog import catalog

RESULTS = "docs/benchmarks/h200.json"
PAGE = "docs/benchmarks/h200.md"
PLOTS = {
    "rate": "docs/benchmarks/h200_rate.svg",
    "roof": "docs/benchmarks/h200_roof.svg",
    "peers": "docs/benchmarks/h200_peers.svg",
}
INTRODUCTION = """\
<!-- Written from receipts and h200.json by tools/generate_docs.py. -->
# Figures on an H200

A time is one call inside a CUDA graph, its inputs not in L2, in rounds that alternate with what
stands beside it; medians, the tenth and ninetieth percentile in brackets. A goal is a named one,
or follows from the call's bytes: at 40 MB and more 0.85 of the copy bandwidth of the same run,
below it bytes / copy bandwidth + {fixed:g} us. The roof is what bytes and flops take at the rates
of the same run. A peer that was not asked for, is not installed or failed is *not run*. Errors are
in ulps of bf16 against the fp64 reference.

`tercel certify --peers --out bundle.json`, then `tercel ops import bundle.json`, refresh the ops;
the other sections name their command.
"""


@dataclass(frozen=True)
class Timed:
    """One timed cell of a receipt."""

    full_name: str
    """category/op."""
    receipt: Receipt
    result: CellResult
    time: CellTime
    ceilings: Ceilings
    why: str
    goal: float | None
    """us; None where it is the best peer's and none was run."""

    @property
    def category(self) -> str:
        return self.full_name.partition("/")[0]

    @property
    def kernel(self) -> str:
        return _kernel(self.receipt)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.time.bytes / self.time.median_us * 1e6

    @property
    def roof_share(self) -> float:
        return roof_us(self.time, self.ceilings) / self.time.median_us

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """Name and time of the fastest other code, public kernels before baselines."""
        others = self.time.peers_us or self.time.baselines_us
        return min(others.items(), key=lambda item: item[1]) if others else None

    @property
    def is_met(self) -> bool:
        return self.goal is not None and self.time.median_us <= self.goal

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return "not run"
        ratio = self.time.median_us / self.goal
        return f"met ({ratio:.2f})" if self.is_met else f"**missed** ({ratio:.2f})"


def _kernel(receipt: Receipt) -> str:
    return f"{receipt.op} {receipt.implementation}"


def receipts() -> list[tuple[str, Receipt]]:
    """(category/op, receipt) of every kernel that ran on sm_90."""
    return [
        (name, receipt)
        for name, op in catalog().items()
        for receipt in receipts_of(op)
        if receipt.arch is Arch.SM_90 and receipt.ran
    ]


@cache
def timed() -> tuple[Timed, ...]:
    """Every cell that has a time."""
    return tuple(each for name, receipt in receipts() for each in _timed(name, receipt))


def _timed(name: str, receipt: Receipt) -> Iterator[Timed]:
    bench = bench_of(catalog()[name])
    cells = {str(cell): cell for cell in bench.every_cell}
    for result in receipt.cells:
        if result.time is None or receipt.ceilings is None or result.cell not in cells:
            continue
        cell = cells[result.cell]
        goal = goal_us(bench.goal_of(cell), result.time, receipt.ceilings)
        parts = (receipt, result, result.time, receipt.ceilings)
        yield Timed(name, *parts, cell.why, goal)


def render(results: Path) -> str:
    """The page; `results` may not exist yet."""
    entries = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    parts = [
        INTRODUCTION.format(fixed=FIXED_US),
        _runs(),
        _named_goals(),
        _plots(),
        _kernels(),
        _errors(),
        *sections(entries),
    ]
    return "\n".join(part for part in parts if part)


def _runs() -> str:
    """The devices, versions and ceilings that receipts name, each once."""
    lines = ["## Runs\n"]
    described = Counter(_run(receipt) for _, receipt in receipts())
    if not described:
        return "No kernel has been certified on an H200 yet.\n"
    lines += [f"- {text}: {count} kernels" for text, count in described.items()]
    return "\n".join(lines) + "\n"


def _run(receipt: Receipt) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in receipt.versions.items())
    run = f"{receipt.device}, {versions}, {receipt.date}, `{receipt.command}`"
    limits = receipt.ceilings
    if limits is None:
        return run
    copy, read = limits.copy_bytes_per_s / 1e9, limits.read_bytes_per_s / 1e9
    flops = limits.bf16_flops_per_s / 1e12
    return f"{run}; copy {copy:.0f} GB/s, read {read:.0f} GB/s, bf16 {flops:.0f} TFLOP/s"


def _named_goals() -> str:
    """Each named goal once: its cell's time by the implementation that serves it."""
    served = _served()
    named = [(*each, served.get((each[0], str(each[1])))) for each in _named_cells()]
    if not named:
        return ""
    met = sum(each is not None and each.is_met for *_, each in named)
    every = sum(each.is_met for each in served.values())
    head = ("op", "served by", "cell", "goal, us", "us", "verdict (time / goal)", "peers, us")
    text = (
        "## Named goals\n\nOf an op at a cell, by the kernel that a target binds there. "
        f"{met} of {len(named)} are met; of all {len(served)} timed cells {every}.\n\n"
    )
    return text + table(head, [_named_row(*each) for each in named], 3)


def _named_row(
    name: str, cell: Cell, goal: float | Literal["best peer"], each: Timed | None
) -> tuple[str, ...]:
    op = name.partition("/")[2]
    if each is None:
        return op, "", str(cell), str(goal), "", "not run", ""
    shown = str(goal) if each.goal is None else f"{each.goal:.2f}"
    return (
        op,
        each.receipt.implementation,
        str(cell),
        shown,
        f"{each.time.median_us:.2f}",
        each.verdict,
        ", ".join(_peers(each.time)),
    )


def _peers(time: CellTime) -> list[str]:
    return [f"{name} {us:.2f}" for name, us in time.peers_us.items()] + [
        f"{name} not run" for name in time.not_run
    ]


def _named_cells() -> Iterator[tuple[str, Cell, float | Literal["best peer"]]]:
    """(category/op, cell, goal) of every bench."""
    for name, op in catalog().items():
        if any(kernel not in PLAIN for kernel in op.implementations):
            bench = bench_of(op)
            goals = ((cell, bench.goal_of(cell)) for cell in bench.every_cell)
            yield from ((name, cell, goal) for cell, goal in goals if goal is not None)


def _served() -> dict[tuple[str, str], Timed]:
    """By (category/op, cell) the time of the implementation that a binding chooses: the first that
    is certified, in the op's order, of those that take the cell; where none is, the first that
    was."""
    served: dict[tuple[str, str], Timed] = {}
    for name, op in catalog().items():
        found: dict[str, list[Timed]] = {}
        for each in timed():
            if each.full_name == name:
                found.setdefault(each.receipt.implementation, []).append(each)
        kernels = [kernel for kernel in op.implementations if kernel in found]
        held = [k for k in kernels if _state(name, found[k][0].receipt) == Status.CERTIFIED]
        for kernel in (*held, *kernels):
            for each in found[kernel]:
                served.setdefault((name, each.result.cell), each)
    return served


def _state(name: str, receipt: Receipt) -> Status:
    return status(catalog()[name], receipt.implementation, receipt.arch)


def _plots() -> str:
    texts = {
        "rate": "Bandwidth against the bytes of a call",
        "roof": "Share of the roof, worst to best cell of each kernel, and its median",
        "peers": "Time over the fastest public kernel's or baseline's",
    }
    return "\n".join(f"![{text}]({Path(PLOTS[name]).name})\n" for name, text in texts.items())


def _kernels() -> str:
    parts = ["## Kernels\n"]
    for name, receipt in receipts():
        rows = [_cell_row(each) for each in timed() if each.kernel == _kernel(receipt)]
        state = _state(name, receipt)
        mark = "" if state is Status.CERTIFIED else f" ({state})"
        if rows:
            head = ("cell", "us", "GB/s", "roof", "goal", "", "beside it", "tolerance")
            parts.append(f"### {name}, {receipt.implementation}{mark}\n\n{table(head, rows, 1)}")
    return "\n".join(parts) if len(parts) > 1 else ""


def _cell_row(each: Timed) -> tuple[str, ...]:
    time = each.time
    others = [*_peers(time), *(f"{name} {us:.2f}" for name, us in time.baselines_us.items())]
    worst = max((error.share for error in each.result.errors.values()), default=0.0)
    return (
        f"{each.result.cell} ({each.why})",
        f"{time.median_us:.2f} ({time.low_us:.2f}..{time.high_us:.2f})",
        f"{each.rate / 1e9:.0f}",
        f"{each.roof_share:.0%}",
        "" if each.goal is None else f"{each.goal:.2f}",
        each.verdict,
        ", ".join(others),
        f"{worst:.0%}",
    )


def _errors() -> str:
    """Per kernel and result, the cell that comes closest to its tolerance."""
    rows = []
    for _, receipt in receipts():
        results = dict.fromkeys(name for cell in receipt.cells for name in cell.errors)
        for result in results:
            errors = [cell.errors[result] for cell in receipt.cells if result in cell.errors]
            worst = max(errors, key=lambda error: error.share)
            rows.append(
                (
                    _kernel(receipt),
                    result,
                    f"{worst.element_ulps:.2f} of {worst.element_allowed:.4g}",
                    f"{worst.rms_ulps:.2f} of {worst.rms_allowed:.4g}",
                    str(len(errors)),
                )
            )
    head = ("kernel", "result", "worst element, ulps", "RMS, ulps", "cells")
    return "## Errors\n\n" + table(head, rows, 2) if rows else ""


def rate_plot() -> str:
    """GB/s against bytes, beside the copy bandwidth and the goal that follows from it."""
    top = max((each.ceilings.copy_bytes_per_s for each in timed()), default=4.3e12)
    x, y = svg.Axis(1e4, 1e10, logarithmic=True), svg.Axis(0, top * 1.15 / 1e9)
    plot = svg.Plot("Bandwidth of a call, GB/s, against its bytes", x, y, height=420)
    sizes = [10 ** (4 + 6 * i / 60) for i in range(61)]
    plot.line([(size, top / 1e9) for size in sizes], svg.FAINT)
    goal = [(size, size / (size / top + FIXED_US * 1e-6) / 1e9) for size in sizes]
    plot.line(goal, "#999999", dashed=True)
    categories = sorted({each.category for each in timed()})
    colours = dict(zip(categories, svg.COLOURS, strict=False))
    for each in timed():
        tip = f"{each.kernel} {each.result.cell}: {each.rate / 1e9:.0f} GB/s"
        plot.point(each.time.bytes, each.rate / 1e9, colours[each.category], tip)
    plot.axes("bytes", " ")
    plot.legend(list(colours.items()))
    return plot.render()


def roof_plot() -> str:
    """Per kernel the range over its cells of the share of the roof."""
    shares: dict[str, list[float]] = {}
    for each in timed():
        shares.setdefault(each.kernel, []).append(100 * each.roof_share)
    plot = _rows_plot("Share of the roof, %", list(shares), svg.Axis(0, 110))
    for index, (kernel, found) in enumerate(shares.items()):
        tip = f"{kernel}: {min(found):.0f} to {max(found):.0f} %"
        plot.bar(min(found), max(found), index, svg.COLOURS[0], tip)
        plot.point(statistics.median(found), index, svg.INK, f"median {tip}")
    plot.line([(100, -0.6), (100, len(shares) - 0.4)], "#999999", dashed=True)
    plot.axes("% of the roof; dot: median cell")
    return plot.render()


def peers_plot() -> str:
    """Per kernel and cell, our time over the fastest other code's."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    for each in timed():
        if each.best_peer is not None:
            name, us = each.best_peer
            entry = (each.time.median_us / us, f"{each.result.cell} beside {name}")
            ratios.setdefault(each.kernel, []).append(entry)
    plot = _rows_plot("Time over the best other code's", list(ratios), svg.Axis(0.1, 10, True))
    for index, (kernel, found) in enumerate(ratios.items()):
        for ratio, what in found:
            plot.point(ratio, index, svg.COLOURS[ratio > 1], f"{kernel} {what}: {ratio:.2f}")
    plot.line([(1, -0.6), (1, len(ratios) - 0.4)], "#999999", dashed=True)
    plot.axes("ratio, below 1 is faster")
    return plot.render()


def _rows_plot(title: str, names: list[str], x: svg.Axis) -> svg.Plot:
    height = svg.TOP + svg.BOTTOM + svg.ROW * max(len(names), 1)
    y = svg.Axis(len(names) - 0.4, -0.6)
    plot = svg.Plot(title, x, y, height, left=240)
    plot.label_rows(names)
    return plot


PLOT_BUILDERS = {"rate": rate_plot, "roof": roof_plot, "peers": peers_plot}
