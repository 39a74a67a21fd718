"""The start of Kimi K3's model, on part of its vocabulary."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.norm.embed_rms_norm.portable import embed_rms_norm

LAYOUTS = ("tp1",)

BENCH = Bench(
    cells=tuple(
        Cell("hidden rows and snapshot", LAYOUTS, T=tokens, V=16384, N=7168, bank=True)
        for tokens in (1, 8, 64, 4096)
    ),
    baselines={"torch": embed_rms_norm},
)
