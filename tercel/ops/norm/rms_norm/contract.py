"""RMSNorm with two roundings, as the published model does it.

    r = act(x * rsqrt(mean(x**2) + eps))          fp32 inside
    y = act(r * weight)

Source: Kimi K3 modeling_kimi_linear.py, KimiRMSNorm.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, width = cell["T"], cell["N"]
    return {
        "x": make.normal(tokens, width),
        "weight": make.uniform(width, low=0.5, high=1.5),
        "eps": 1e-5,
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, width = sizes["T"], sizes["N"]
    return Cost(bytes=(2 * tokens * width + width) * sizes["act"], flops=4 * tokens * width)


CONTRACT = Contract(
    axes={"T": "tokens", "N": "width of the row"},
    args={
        "x": Arg("T N", layout="rows"),
        "weight": Arg("N"),
        "eps": Value(float, "inside the root"),
    },
    returns={"y": Arg("T N")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano hidden rows", layouts=("tp1",), T=5, N=256),
        Cell(
            "K3 hidden row, one token", layouts=("tp16_moetp4ep4", "tp16_moetp16ep1"), T=1, N=7168
        ),
        Cell("K3 latent norm in prefill", layouts=("tp16_moetp4ep4",), T=33, N=3584),
    ),
    tolerance=Tolerance(
        element_ulps=4,
        rms_ulps=1.5,
        fp32_element_ulps=2,
        fp32_rms_ulps=2,
        why="two roundings of half an ulp each plus the fp32 sum; a row's largest element may sit "
        "just above a power of two, which doubles an ulp; in fp32 also the root, which a GPU gives "
        "to two ulps",
    ),
    hazards=(Hazard("early_read", "the weight is read before the wait", ("weight",)),),
)
