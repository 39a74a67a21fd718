"""One and two tokens of Kimi K3, at fewer experts; benchmarks/experts.py times a rank."""

from tercel.contract import Cell
from tercel.contract.bench import Bench

TP16 = ("tp16_moetp16ep1",)
HERE = {"k": 16, "L": 3584, "mxfp4": True}

BENCH = Bench(
    cells=(
        Cell("all experts here, one token", TP16, T=1, E=64, I=192, **HERE),
        Cell("two tokens, mostly different experts", TP16, T=2, E=64, I=192, **HERE),
        Cell("two tokens, the same experts", TP16, T=2, E=16, I=192, **HERE),
        Cell("wide", ("tp16_moetp4ep4",), T=1, k=4, E=24, L=3584, I=768, mxfp4=True),
    ),
)
