"""gemm/linear_glu for the few rows of a decode step, where the weight's bytes are the cost.

    g | u = act(x @ weight^T)          fp32 sums, one rounding; the gate's rows come first
    y     = activation(g, u)           rounded as activation/situ_mul or silu_mul round

Source: as gemm/linear_glu.
"""

from tercel.contract import Arg, Cell, Contract, Hazard
from tercel.ops.gemm.gemv.contract import MAX_ROWS
from tercel.ops.gemm.linear_glu.contract import ARGS, AXES, TOLERANCE, WHERE, cost, inputs

CONTRACT = Contract(
    axes=AXES,
    args=ARGS,
    returns={"y": Arg("T I")},
    cost=cost,
    inputs=inputs,
    where=(*WHERE, f"T <= {MAX_ROWS}"),
    cells=(
        Cell("nano shared expert at tp4", ("tp4",), T=4, K=256, I=64),
        Cell("SiLU, rows of a wider tensor", T=8, K=64, I=40, activation="silu", spare=8),
        Cell("no bound on the up half", T=2, K=72, I=5, linear_beta=None),
        Cell("largest row count", T=MAX_ROWS, K=64, I=20),
        Cell("K3 rank's depth, one token", ("tp16_moetp4ep4",), T=1, K=7168, I=3),
    ),
    tolerance=TOLERANCE,
    hazards=(
        Hazard("capacity", f"more than {MAX_ROWS} rows: use gemm/linear_glu", ("x",), raises=True),
        Hazard("early_read", "the weight is read before the wait", ("weight",)),
    ),
)
