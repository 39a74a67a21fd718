"""A gated linear unit: gate and up projections in one weight, and the activation of both.

    g | u = act(x @ weight^T)          fp32 sums, one rounding; the gate's rows come first
    y     = activation(g, u)           rounded as activation/situ_mul or silu_mul round

Source: Kimi K3 modeling_kimi_linear.py, the dense and the shared experts' MLP; Kimi-Linear
modeling_kimi.py, KimiMLP.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance, Value
from tercel.contract.contract import InputMaker

AXES = {"T": "rows", "K": "input features", "I": "intermediate size"}
ARGS: Mapping[str, Arg | Value] = {
    "x": Arg("T K", layout="rows"),
    "weight": Arg("2*I K"),
    "activation": Value(str, "situ or silu"),
    "beta": Value((float, NoneType), "of situ"),
    "linear_beta": Value((float, NoneType), "of situ; None: unbounded"),
}
WHERE = (
    "activation in ('situ', 'silu')",
    "activation == 'silu' or (beta is not None and beta > 0)",
    "linear_beta is None or linear_beta > 0",
)
TOLERANCE = Tolerance(
    element_ulps=4,
    rms_ulps=1.5,
    fp32_element_ulps=120,
    fp32_rms_ulps=80,
    why="each factor of the product is rounded by half an ulp, SiLU's once more, then the result; "
    "where gate and up are large, their product carries both errors at its own size; fp32 sums of "
    "up to 7168 terms, in any order, for each factor, and the activation's functions",
)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    situ = cell.get("activation", "situ") == "situ"
    rows = make.normal(cell["T"], cell["K"] + cell.get("spare", 0))
    return {
        "x": rows[:, : cell["K"]],
        "weight": make.normal(2 * cell["I"], cell["K"], scale=2 * cell["K"] ** -0.5),
        "activation": "situ" if situ else "silu",
        "beta": 4.0 if situ else None,
        "linear_beta": cell.get("linear_beta", 25.0) if situ else None,
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, depth, width = sizes["T"], sizes["K"], sizes["I"]
    moved = (tokens * depth + 2 * width * depth + tokens * width) * sizes["act"]
    return Cost(bytes=moved, flops=4 * tokens * width * depth)


CONTRACT = Contract(
    axes=AXES,
    args=ARGS,
    returns={"y": Arg("T I")},
    cost=cost,
    inputs=inputs,
    where=WHERE,
    cells=(
        Cell("nano shared expert, prefill", ("tp1",), T=97, K=256, I=256),
        Cell("SiLU, rows of a wider tensor", T=3, K=64, I=40, activation="silu", spare=16),
        Cell("no bound on the up half", T=2, K=64, I=24, linear_beta=None),
    ),
    tolerance=TOLERANCE,
)
