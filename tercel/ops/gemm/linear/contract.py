"""A linear layer without bias; its last columns may be output gates.

    p = act(x @ weight^T)                                   fp32 sums, one rounding
    y = p, and act(sigmoid(p)) in columns sigmoid_from ..   the sigmoid reads the rounded product

The gate's double rounding is the published model's: projection, then sigmoid, each in act.
Source: Kimi K3 modeling_kimi_linear.py, the bias-free projections; MLA's g_proj.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance, Value
from tercel.contract.contract import InputMaker

ARGS: Mapping[str, Arg | Value] = {
    "x": Arg("T K", layout="rows"),
    "weight": Arg("M K"),
    "sigmoid_from": Value((int, NoneType), "first gated column; None: no gate"),
}
TOLERANCE = Tolerance(
    element_ulps=1.5,
    rms_ulps=0.75,
    fp32_element_ulps=40,
    fp32_rms_ulps=40,
    why="one rounding of half an ulp, a second in gated columns; fp32 sums of up to 7168 terms, "
    "in any order",
)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    rows = make.normal(cell["T"], cell["K"] + cell.get("spare", 0))
    return {
        "x": rows[:, : cell["K"]],
        "weight": make.normal(cell["M"], cell["K"], scale=cell["K"] ** -0.5),
        "sigmoid_from": cell.get("sigmoid_from"),
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, depth, columns = sizes["T"], sizes["K"], sizes["M"]
    moved = (tokens * depth + columns * depth + tokens * columns) * sizes["act"]
    return Cost(bytes=moved, flops=2 * tokens * columns * depth)


WHERE = ("sigmoid_from is None or 0 <= sigmoid_from <= M",)

CONTRACT = Contract(
    axes={"T": "rows", "K": "input features", "M": "output features"},
    args=ARGS,
    returns={"y": Arg("T M")},
    cost=cost,
    inputs=inputs,
    where=WHERE,
    cells=(
        Cell("nano projection, one token", ("tp1",), T=1, K=256, M=512),
        Cell("nano projection with gate", ("tp1",), T=8, K=256, M=1216, sigmoid_from=704),
        Cell("rows of a wider tensor", T=3, K=64, M=40, sigmoid_from=0, spare=16),
        Cell("nano prefill", ("tp1",), T=97, K=256, M=256),
        Cell(
            "K3 rank's MLA gate, few rows", ("tp16_moetp4ep4",), T=2, K=7168, M=96, sigmoid_from=64
        ),
    ),
    tolerance=TOLERANCE,
)
