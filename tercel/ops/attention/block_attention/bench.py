"""Draft blocks of a K3 drafter: a rank of sixteen, and all heads of an MLA drafter's layer."""

from typing import Any

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.attention.block_attention.portable import block_attention

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")
KIB = 1024


def cell(why: str, context: int, rows: int, **sizes: Any) -> Cell:
    """`rows` requests of seven guesses with so many context tokens."""
    pages = rows * context // 64 + 1
    return Cell(why, LAYOUTS, width=8, **sizes, PS=64, PAGES=pages, contexts=(context,) * rows)


GQA = {"H": 6, "KV": 1, "D": 64}

BENCH = Bench(
    cells=(
        *(
            cell("one request, several", context * KIB, rows, **GQA)
            for context, rows in ((1, 1), (8, 1), (64, 1), (8, 8))
        ),
        cell("MLA, values in keys", 8 * KIB, 1, H=6, KV=1, D=576, V=512),
    ),
    baselines={"torch": block_attention},
)
