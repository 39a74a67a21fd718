"""gemm/linear for the few rows of a decode step, where the weight's bytes are the cost.

    p = act(x @ weight^T)                                   fp32 sums, one rounding
    y = p, and act(sigmoid(p)) in columns sigmoid_from ..   the sigmoid reads the rounded product

Source: as gemm/linear.
"""

from tercel.contract import Arg, Cell, Contract, Hazard
from tercel.ops.gemm.linear.contract import ARGS, TOLERANCE, WHERE, cost, inputs

MAX_ROWS = 64

CONTRACT = Contract(
    axes={"T": "rows", "K": "input features", "M": "output features"},
    args=ARGS,
    returns={"y": Arg("T M")},
    cost=cost,
    inputs=inputs,
    where=(*WHERE, f"T <= {MAX_ROWS}"),
    cells=(
        Cell("nano projection", ("tp1",), T=1, K=256, M=512),
        Cell("nano projection with gate", ("tp1",), T=8, K=256, M=1216, sigmoid_from=704),
        Cell("largest row count", T=MAX_ROWS, K=64, M=40),
        Cell("K3 rank's router, low-latency head", ("tp16_moetp4ep4",), T=1, K=7168, M=280),
    ),
    tolerance=TOLERANCE,
    hazards=(
        Hazard("capacity", f"more than {MAX_ROWS} rows: use gemm/linear", ("x",), raises=True),
        Hazard("early_read", "the weight is read before the wait", ("weight",)),
    ),
)
