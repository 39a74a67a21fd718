"""A sublayer's output joins the residual stream; then the RMSNorm of the next sublayer.

    updated = act(residual + x)
    r       = act(updated * rsqrt(mean(updated**2) + eps))    fp32 inside
    normed  = act(r * weight)

For models with a plain residual. The norm reads the rounded sum.
Source: Kimi-Linear modeling_kimi.py, the decoder layer and KimiRMSNorm.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, width = cell["T"], cell["N"]
    return {
        "x": make.normal(tokens, width),
        "residual": make.normal(tokens, width),
        "weight": make.uniform(width, low=0.5, high=1.5),
        "eps": 1e-5,
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, width = sizes["T"], sizes["N"]
    return Cost(bytes=(4 * tokens * width + width) * sizes["act"], flops=5 * tokens * width)


CONTRACT = Contract(
    axes={"T": "tokens", "N": "hidden size"},
    args={
        "x": Arg("T N", layout="rows"),
        "residual": Arg("T N", layout="rows"),
        "weight": Arg("N"),
        "eps": Value(float, "inside the root"),
    },
    returns={"normed": Arg("T N"), "updated": Arg("T N")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano decode", ("tp1",), T=1, N=256),
        Cell("nano batch", ("tp1",), T=8, N=256),
        Cell("Kimi-Linear hidden rows", ("tp1", "tp2"), T=3, N=2304),
    ),
    tolerance={
        "updated": Tolerance(element_ulps=1, rms_ulps=0.6, why="one rounding of half an ulp"),
        "normed": Tolerance(
            element_ulps=4,
            rms_ulps=1.25,
            fp32_element_ulps=2,
            fp32_rms_ulps=2,
            why="three roundings, each up to an ulp just above a power of two: sum, normalised "
            "row, product; in fp32 also the mean and the root",
        ),
    },
    hazards=(Hazard("early_read", "the weight is read before the wait", ("weight",)),),
)
