"""KDA layers in a decode step, beside fla's recurrence where that is installed."""

from tercel.contract import Cell
from tercel.contract.certify import Bench
from tercel.ops._lib.kda import HEAD
from tercel.ops._lib.kda_peers import peers

RANK = ("tp16_moetp4ep4", "tp16_moetp16ep1")


def cell(why: str, layouts: tuple[str, ...], heads: int, rows: int, bound: float | None) -> Cell:
    sizes = {"R": rows, "H": heads, "S": 3, "SLOTS": rows + 1, "lower_bound": bound, **HEAD}
    return Cell(why, layouts, **sizes)


BENCH = Bench(
    cells=(
        *(cell("K3, a rank of 16", RANK, 6, rows, -5.0) for rows in (1, 8, 64)),
        *(cell("K3, a rank of 8", ("tp8_pp2",), 12, rows, -5.0) for rows in (8, 64)),
        *(cell("K3, all heads", ("tp1",), 96, rows, -5.0) for rows in (1, 8, 64)),
        *(cell("Kimi-Linear", ("tp1",), 32, rows, None) for rows in (1, 8, 32)),
    ),
    baselines=peers(),
)
