"""A linear layer whose result stays fp32: router logits.

    y = x @ weight^T          inputs in act, fp32 sums, no rounding to act

Rounding router logits to bf16 would change the chosen experts of some tokens.
Source: Kimi K3 modeling_kimi_linear.py, the MoE gate.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {
        "x": make.normal(cell["T"], cell["K"]),
        "weight": make.normal(cell["M"], cell["K"], scale=cell["K"] ** -0.5),
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, depth, columns = sizes["T"], sizes["K"], sizes["M"]
    moved = (tokens + columns) * depth * sizes["act"] + 4 * tokens * columns
    return Cost(bytes=moved, flops=2 * tokens * columns * depth)


CONTRACT = Contract(
    axes={"T": "rows", "K": "input features", "M": "output features"},
    args={"x": Arg("T K", layout="rows"), "weight": Arg("M K")},
    returns={"y": Arg("T M", "f32")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano router, one token", ("tp1",), T=1, K=256, M=16),
        Cell("nano router, batch", ("tp1",), T=8, K=256, M=16),
        Cell("K3 router rows of a rank", ("tp16_moetp4ep4",), T=2, K=7168, M=56),
    ),
    tolerance=Tolerance(
        element_ulps=0,
        rms_ulps=0,
        fp32_element_ulps=40,
        fp32_rms_ulps=40,
        why="fp32 sums of up to 7168 terms, in any order; products of two bf16 values are exact",
    ),
    hazards=(Hazard("early_read", "the weight is read before the wait", ("weight",)),),
)
