"""Kimi K3 at few tokens, which the fp64 reference can follow; benchmarks/experts_prefill.py times a
rank at thousands, beside the goals."""

from tercel.contract import Cell
from tercel.contract.bench import Bench

HERE = {"k": 16, "L": 3584, "mxfp4": True}

BENCH = Bench(
    cells=(
        Cell("most slots here", ("tp16_moetp4ep4",), T=96, E=16, I=768, **HERE),
        Cell("all here, narrow", ("tp16_moetp16ep1",), T=96, E=48, I=192, **HERE),
        Cell("Kimi-Linear", ("tp1",), T=96, k=8, E=16, L=2304, I=1024, activation="silu"),
    ),
)
