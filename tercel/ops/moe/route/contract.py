"""Routing without auxiliary loss: sigmoid scores, a bias that only selects.

    s       = sigmoid(logits)
    ids     = the top_k experts of s + bias, best first, ties to the lower id
    weights = scaling * s[ids] / (sum of s[ids] + 1e-20)        without the bias

Without `renormalize` the division is left out. fp32 throughout.
Source: Kimi K3 modeling_kimi_linear.py, the MoE gate (noaux_tc with one group).
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {
        "logits": make.normal(cell["T"], cell["E"], dtype="f32"),
        "bias": make.normal(cell["E"], scale=0.1, dtype="f32"),
        "top_k": cell["top_k"],
        "scaling": cell.get("scaling", 1.0),
        "renormalize": cell.get("renormalize", True),
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, experts, chosen = sizes["T"], sizes["E"], sizes["top_k"]
    return Cost(bytes=4 * (tokens + 1) * experts + 12 * tokens * chosen, flops=5 * tokens * experts)


CONTRACT = Contract(
    axes={"T": "tokens", "E": "experts of all ranks"},
    args={
        "logits": Arg("T E", "f32"),
        "bias": Arg("E", "f32"),
        "top_k": Value(int, "experts per token"),
        "scaling": Value(float, "of the weights"),
        "renormalize": Value(bool, "whether a token's weights sum to scaling"),
    },
    returns={"ids": Arg("T top_k", "i64"), "weights": Arg("T top_k", "f32")},
    cost=cost,
    inputs=inputs,
    where=("1 <= top_k <= E",),
    cells=(
        Cell("nano decode", ("tp1",), T=1, E=16, top_k=4),
        Cell("nano batch", ("tp1",), T=8, E=16, top_k=4),
        Cell("Kimi-Linear", ("tp1", "tp2"), T=3, E=256, top_k=8, scaling=2.446),
        Cell("raw scores", T=2, E=12, top_k=3, scaling=1.5, renormalize=False),
        Cell("K3, 896 experts", ("tp16_moetp4ep4", "tp16_moetp16ep1"), T=4, E=896, top_k=16),
    ),
    tolerance=Tolerance(
        element_ulps=6,
        rms_ulps=3,
        why="fp32: sigmoid, a sum of top_k scores, a division and a product; ids are exact",
    ),
    hazards=(Hazard("early_read", "the bias is read before the wait", ("bias",)),),
)
