"""As experts_grouped's; benchmarks/experts_prefill.py times a rank at thousands of tokens."""

from tercel.contract import Cell
from tercel.contract.bench import Bench

BENCH = Bench(
    cells=(
        Cell("most slots here", ("tp16_moetp4ep4",), T=96, k=16, E=16, L=3584, I=768),
        Cell("all here, narrow", ("tp16_moetp16ep1",), T=96, k=16, E=48, L=3584, I=192),
    ),
)
