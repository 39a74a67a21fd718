"""Prompts of Kimi K3, per rank of 16, per rank of 8, and with all heads.

The goals are the better of FlashKDA and fla, measured on an H200 with the gate inside them.
"""

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.ops._lib.kda_peers import chunk_kda, flash_kda

PROMPT, LONG, LONGEST = (0, 1024), (0, 8192), (0, 65536)
BATCH = tuple(range(0, 8193, 1024))
GOALS_US = {
    (6, PROMPT): 80,
    (6, LONG): 351,
    (6, BATCH): 175,
    (12, PROMPT): 93,
    (12, LONG): 509,
    (12, BATCH): 218,
    (96, PROMPT): 208,
    (6, LONGEST): 2569,
    (12, LONGEST): 3678,
    (96, LONG): 1412,
    (96, BATCH): 1216,
    (96, LONGEST): 11002,
}
MANY = 12 * 8192
"""Heads times tokens up to which the reference, a token at a time, is quick enough."""
LAYOUTS = {6: ("tp16_moetp4ep4", "tp16_moetp16ep1"), 12: ("tp8_pp2",), 96: ("tp1",)}


def cell(heads: int, bounds: tuple[int, ...]) -> Cell:
    sizes = {"H": heads, "K": 128, "V": 128, "SLOTS": len(bounds) + 1}
    return Cell("prompts", LAYOUTS[heads], **sizes, g_min=-1.0, cu_seqlens=bounds)


BENCH = Bench(
    cells=tuple(cell(*key) for key in GOALS_US if key[0] * key[1][-1] <= MANY),
    long=tuple(cell(*key) for key in GOALS_US if key[0] * key[1][-1] > MANY),
    peers={"fla": chunk_kda, "FlashKDA": flash_kda},
    goals=tuple(Goal(us, H=heads, cu_seqlens=bounds) for (heads, bounds), us in GOALS_US.items()),
)
