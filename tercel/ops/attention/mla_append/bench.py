"""Entries of Kimi K3 in a decode step and in a chunk of a prompt."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.attention.mla_append.reference import mla_append

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")
SIZES = {"L": 512, "E": 576, "PS": 64}

BENCH = Bench(
    cells=(
        Cell("a decode step", LAYOUTS, **SIZES, T=8, PAGES=3),
        Cell("a chunk of a prompt", LAYOUTS, **SIZES, T=4096, PAGES=90),
    ),
    baselines={"torch": mla_append},
)
