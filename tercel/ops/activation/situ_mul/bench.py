"""Gated activations of Kimi K3."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.activation.situ_mul.portable import situ_mul

BENCH = Bench(
    cells=(
        Cell("dense MLP of a rank", ("tp16_moetp4ep4",), T=1, I=2112),
        Cell("dense MLP of a rank", ("tp16_moetp4ep4",), T=8, I=2112),
        Cell("dense MLP of a rank", ("tp16_moetp4ep4",), T=64, I=2112),
        Cell("shared experts of a rank", ("tp16_moetp4ep4",), T=8, I=384),
        Cell("dense MLP, prefill", ("tp16_moetp4ep4",), T=4096, I=2112),
    ),
    baselines={"torch": situ_mul},
)
