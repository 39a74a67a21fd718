"""Draft blocks of a K3 drafter on a rank of sixteen, and of one GPU with every head."""

from typing import Any

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.attention.block_attention_qk_norm_rope.portable import block_attention_qk_norm_rope

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")
KIB = 1024


def cell(why: str, layouts: tuple[str, ...], context: int, rows: int, **sizes: Any) -> Cell:
    """`rows` requests of seven guesses with so many context tokens."""
    pages = rows * context // 64 + 1
    return Cell(why, layouts, width=8, **sizes, PS=64, PAGES=pages, contexts=(context,) * rows)


BENCH = Bench(
    cells=(
        *(
            cell("one request, several", LAYOUTS, context * KIB, rows, H=6, KV=1, D=64)
            for context, rows in ((1, 1), (8, 1), (64, 1), (8, 8))
        ),
        cell("every head", (), 8 * KIB, 8, H=96, KV=16, D=64),
    ),
    baselines={"torch": block_attention_qk_norm_rope},
)
