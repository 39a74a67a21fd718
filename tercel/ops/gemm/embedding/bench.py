"""A rank's part of Kimi K3's table."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.gemm.embedding.portable import embedding

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")

BENCH = Bench(
    cells=tuple(
        Cell("hidden rows", LAYOUTS, T=tokens, V=10240, N=7168, vocabulary=163840, first=10240)
        for tokens in (1, 8, 64, 4096)
    ),
    baselines={"torch": embedding},
)
