"""Log decays of a prefill step, beside plain torch."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.linear_attention.kda_gate.reference import kda_gate


def cell(why: str, layouts: tuple[str, ...], tokens: int, heads: int, bound: float | None) -> Cell:
    return Cell(why, layouts, T=tokens, H=heads, K=128, lower_bound=bound)


BENCH = Bench(
    cells=(
        *(cell("K3, a rank of 16", ("tp16_moetp4ep4",), t, 6, -5.0) for t in (1024, 8192)),
        cell("K3, all heads", ("tp1",), 2048, 96, -5.0),
        cell("Kimi-Linear", ("tp1",), 8192, 32, None),
    ),
    baselines={"torch": kda_gate},
)
