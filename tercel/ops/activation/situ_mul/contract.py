"""SiTU-GLU: a gated activation whose both factors are bounded.

    y = act(beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta))

fp32 inside, one rounding. Without linear_beta the last two factors are `up`. |y| is at most
beta * linear_beta.
Source: Kimi K3 modeling_kimi_linear.py, the `situ` activation.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance, Value
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {
        "gate_up": make.normal(cell["T"], 2 * cell["I"], scale=4.0),
        "beta": 4.0,
        "linear_beta": cell.get("linear_beta", 25.0),
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    elements = sizes["T"] * sizes["I"]
    return Cost(bytes=3 * elements * sizes["act"], flops=10 * elements)


CONTRACT = Contract(
    axes={"T": "rows", "I": "intermediate size"},
    args={
        "gate_up": Arg("T 2*I", layout="rows"),
        "beta": Value(float, "bound of the gate's factor"),
        "linear_beta": Value((float, NoneType), "bound of the up factor; None: unbounded"),
    },
    returns={"y": Arg("T I")},
    cost=cost,
    inputs=inputs,
    where=("beta > 0", "linear_beta is None or linear_beta > 0"),
    cells=(
        Cell("nano shared expert, decode", ("tp1",), T=1, I=256),
        Cell("nano shared expert, batch", ("tp1",), T=8, I=256),
        Cell("no bound on the up half", T=3, I=32, linear_beta=None),
        Cell("K3 dense rank", ("tp16_moetp4ep4",), T=2, I=2112),
    ),
    tolerance=Tolerance(
        element_ulps=1.25,
        rms_ulps=0.6,
        fp32_element_ulps=12,
        fp32_rms_ulps=6,
        why="one rounding of half an ulp; in fp32 two divisions, two tanh, sigmoid and the "
        "products, of exponentials that a GPU gives to two ulps",
    ),
)
