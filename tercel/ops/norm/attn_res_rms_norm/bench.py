"""Attention residuals of Kimi K3."""

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.ops.norm.attn_res_rms_norm.portable import attn_res_rms_norm

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")

BENCH = Bench(
    cells=(
        *(Cell("a late layer", LAYOUTS, S=8, T=tokens, N=7168) for tokens in (1, 8, 64, 2048)),
        *(Cell("fewer and more", LAYOUTS, S=snapshots, T=8, N=7168) for snapshots in (1, 4, 11)),
    ),
    baselines={"torch": attn_res_rms_norm},
    goals=(Goal(3.0, S=8, T=1), Goal(3.5, S=8, T=8), Goal(6.0, S=8, T=64)),
)
