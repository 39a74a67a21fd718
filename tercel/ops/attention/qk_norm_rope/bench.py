"""Blocks of a K3 drafter on a rank of sixteen and of a GPU with every head."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.attention.qk_norm_rope.portable import qk_norm_rope

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")
SIZES = {"H": 6, "KV": 1, "D": 64, "positions": 1 << 20}

BENCH = Bench(
    cells=(
        Cell("a block", LAYOUTS, **SIZES, T=8),
        Cell("64 blocks", LAYOUTS, **SIZES, T=512),
        Cell("64 blocks, every head", (), **{**SIZES, "H": 96, "KV": 16}, T=512),
    ),
    baselines={"torch": qk_norm_rope},
)
