"""Greedy rows and draws, with and without filters, over Kimi K3's vocabulary."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.sampling.sample.portable import sample

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")

BENCH = Bench(
    cells=tuple(
        Cell("the whole vocabulary", LAYOUTS, S=rows, V=163840, kind=kind)
        for kind in ("greedy", "plain", "filtered")
        for rows in (1, 8, 64)
    ),
    baselines={"torch": sample},
)
