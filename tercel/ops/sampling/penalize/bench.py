"""Penalties of rows that have written a thousand different tokens."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.sampling.penalize.reference import penalize

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")

BENCH = Bench(
    cells=(
        *(
            Cell("the whole vocabulary", LAYOUTS, S=rows, V=163840, C=1000 * rows, B=10 * rows)
            for rows in (1, 8)
        ),
        Cell("nano", ("tp1",), S=64, V=1280, C=6400, B=64),
    ),
    baselines={"torch": penalize},
)
