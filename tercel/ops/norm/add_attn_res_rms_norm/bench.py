"""Attention residuals of Kimi K3 in a decode step."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.norm.add_attn_res_rms_norm.portable import add_attn_res_rms_norm

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")

BENCH = Bench(
    cells=(
        *(
            Cell("a late layer", LAYOUTS, S=8, T=tokens, N=7168, prefix=True)
            for tokens in (1, 8, 64)
        ),
        *(
            Cell("fewest and most snapshots", LAYOUTS, S=snapshots, T=8, N=7168, prefix=True)
            for snapshots in (0, 1, 11)
        ),
        Cell("after a snapshot", LAYOUTS, S=8, T=8, N=7168, prefix=False),
    ),
    baselines={"torch": add_attn_res_rms_norm},
)
