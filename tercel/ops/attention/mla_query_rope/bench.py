"""Queries and entries of the published MLA drafter's block, per rank of 16 and whole."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.attention.mla_query_rope.reference import mla_query_rope

SIZES = {"Q": 1536, "K": 128, "L": 512, "E": 576}

BENCH = Bench(
    cells=(
        Cell("a block", ("tp16_moetp4ep4",), **SIZES, T=8, H=4),
        Cell("blocks of eight requests", ("tp16_moetp4ep4",), **SIZES, T=64, H=4),
        Cell("a block, every head", (), **SIZES, T=8, H=64),
    ),
    baselines={"torch": mla_query_rope},
)
