"""Attention residuals of Kimi K3."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.norm.attn_res.portable import attn_res

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")

BENCH = Bench(
    cells=(
        *(Cell("a late layer", LAYOUTS, S=8, T=tokens, N=7168) for tokens in (1, 8, 64, 2048)),
        *(Cell("fewer and more", LAYOUTS, S=snapshots, T=8, N=7168) for snapshots in (1, 4, 11)),
    ),
    baselines={"torch": attn_res},
)
