"""Accepted drafts joining the state before a checkpoint, beside plain torch."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops._lib.kda import HEAD
from tercel.ops.linear_attention.kda_commit.portable import kda_commit

BENCH = Bench(
    cells=tuple(
        Cell("seven drafts", layouts, R=rows, H=heads, D=7, SLOTS=rows + 1, **HEAD)
        for layouts, heads, rows in (
            (("tp16_moetp4ep4",), 6, 1),
            (("tp16_moetp4ep4",), 6, 8),
            (("tp1",), 96, 8),
        )
    ),
    baselines={"torch": kda_commit},
)
