"""Values of Kimi K3's MLA drafter."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.gemm.head_linear.reference import head_linear

BENCH = Bench(
    cells=tuple(
        Cell("MLA drafter, a block", ("tp16_moetp4ep4",), T=tokens, H=4, M=128, K=512)
        for tokens in (8, 64)
    ),
    baselines={"bmm": head_linear},
)
