"""The residual stream of Kimi-Linear."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.norm.add_rms_norm.portable import add_rms_norm

BENCH = Bench(
    cells=tuple(
        Cell("Kimi-Linear hidden rows", ("tp1", "tp2"), T=tokens, N=2304)
        for tokens in (1, 8, 64, 4096)
    ),
    baselines={"torch": add_rms_norm},
)
