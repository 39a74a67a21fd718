"""Prompts of Kimi K3, per rank of 16, per rank of 8, and with all heads.

The goals are the better of FlashKDA and fla, measured on an H200 with the gate inside them. Longer
calls are timed by benchmarks/kda_prefill_long.py: a reference token by token takes minutes there.
"""

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.ops._lib.kda_peers import chunk_kda, flash_kda

PROMPT, LONG, BATCH = (0, 1024), (0, 8192), tuple(range(0, 8193, 1024))
GOALS_US = {
    (6, PROMPT): 80,
    (6, LONG): 351,
    (6, BATCH): 175,
    (12, PROMPT): 93,
    (12, LONG): 509,
    (12, BATCH): 218,
    (96, PROMPT): 208,
}
LAYOUTS = {6: ("tp16_moetp4ep4", "tp16_moetp16ep1"), 12: ("tp8_pp2",), 96: ("tp1",)}


def cell(heads: int, bounds: tuple[int, ...]) -> Cell:
    sizes = {"H": heads, "K": 128, "V": 128, "SLOTS": len(bounds) + 1}
    return Cell("prompts", LAYOUTS[heads], **sizes, g_min=-1.0, cu_seqlens=bounds)


BENCH = Bench(
    cells=tuple(cell(heads, bounds) for heads, bounds in GOALS_US),
    peers={"fla": chunk_kda, "FlashKDA": flash_kda},
    goals=tuple(Goal(us, H=heads, cu_seqlens=bounds) for (heads, bounds), us in GOALS_US.items()),
)
