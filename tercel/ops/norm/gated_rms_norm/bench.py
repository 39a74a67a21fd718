"""The output norm of KDA at the heads of each layout."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.norm.gated_rms_norm.portable import gated_rms_norm

HEADS = {6: ("tp16_moetp4ep4", "tp16_moetp16ep1"), 12: ("tp8_pp2",), 96: ("tp1",)}

BENCH = Bench(
    cells=tuple(
        Cell("gate inside a projection", layouts, T=tokens, H=heads, V=128, spare=8)
        for heads, layouts in HEADS.items()
        for tokens in (1, 64, 4096)
    ),
    baselines={"torch": gated_rms_norm},
)
