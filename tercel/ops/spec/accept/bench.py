"""Verify steps of Kimi K3 whose logits are gathered, and one of nano."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.spec.accept.portable import accept

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")

BENCH = Bench(
    cells=(
        Cell("nano, one request", ("tp1",), R=1, G=7, V=1280, kind="drawn", rule="block"),
        *(
            Cell("greedy", LAYOUTS, R=requests, G=7, V=163840, kind="greedy", rule="match")
            for requests in (1, 8, 64)
        ),
        Cell("its own draws", LAYOUTS, R=1, G=7, V=163840, kind="plain", rule="match"),
        *(
            Cell("block", LAYOUTS, R=requests, G=7, V=163840, kind="drawn", rule="block")
            for requests in (1, 8)
        ),
    ),
    baselines={"torch": accept},
)
