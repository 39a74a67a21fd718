"""KDA layers in a decode step, beside fla's recurrence, which has neither convolution nor norm."""

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.ops._lib.kda import HEAD
from tercel.ops._lib.kda_peers import fused_recurrent

TP16 = ("tp16_moetp4ep4", "tp16_moetp16ep1")
GOALS = {(6, 1): 4.5, (6, 8): 6.0, (6, 64): 16.0, (96, 8): 30.0, (96, 64): 230.0}
"""(heads, rows) to microseconds."""


def cell(
    why: str, layouts: tuple[str, ...], heads: int, rows: int, bound: float | None = -5.0
) -> Cell:
    sizes = {"R": rows, "H": heads, "S": 3, "SLOTS": rows + 1, "lower_bound": bound, **HEAD}
    return Cell(why, layouts, **sizes)


BENCH = Bench(
    cells=(
        *(cell("K3, a rank of 16", TP16, 6, rows) for rows in (1, 8, 64)),
        cell("K3, a rank of 8", ("tp8_pp2",), 12, 8),
        *(cell("K3, all heads", ("tp1",), 96, rows) for rows in (8, 64)),
        cell("Kimi-Linear", ("tp1",), 32, 8, bound=None),
    ),
    peers={"fla, recurrence alone": fused_recurrent},
    goals=tuple(Goal(us, H=heads, R=rows) for (heads, rows), us in GOALS.items()),
)
