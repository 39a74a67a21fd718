"""Gated activations of Kimi-Linear."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.activation.silu_mul.portable import silu_mul

BENCH = Bench(
    cells=(
        Cell("Kimi-Linear dense MLP", ("tp1",), T=1, I=9216),
        Cell("Kimi-Linear dense MLP", ("tp1",), T=64, I=9216),
        Cell("Kimi-Linear shared expert", ("tp1", "tp2"), T=8, I=1024),
        Cell("Kimi-Linear shared expert, prefill", ("tp1", "tp2"), T=4096, I=1024),
    ),
    baselines={"torch": silu_mul},
)
