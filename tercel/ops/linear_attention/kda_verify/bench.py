"""KDA layers in a verify step of eight tokens, beside fla's recurrence of eight tokens, which has
no pending drafts, convolution, records or norm."""

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.ops._lib.kda import HEAD
from tercel.ops._lib.kda_peers import fused_recurrent

DRAFTS = {"width": 8, "D": 7}


def cell(why: str, layouts: tuple[str, ...], heads: int, rows: int) -> Cell:
    sizes = {"R": rows, "H": heads, "SLOTS": rows + 1, "lower_bound": -5.0, **DRAFTS, **HEAD}
    return Cell(why, layouts, **sizes)


BENCH = Bench(
    cells=(
        *(cell("K3, a rank of 16", ("tp16_moetp4ep4",), 6, rows) for rows in (1, 8, 64)),
        cell("K3, all heads", ("tp1",), 96, 8),
    ),
    peers={"fla, recurrence alone": fused_recurrent},
    goals=(Goal("best peer"),),
)
