"""Gate and up projections of a prompt, beside plain torch."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.gemm.linear_glu.portable import linear_glu

BENCH = Bench(
    cells=(Cell("dense MLP, prefill", ("tp16_moetp4ep4",), T=4096, K=7168, I=2112),),
    baselines={"torch": linear_glu},
)
