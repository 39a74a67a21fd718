"""A linear layer per head: what absorbed MLA makes of its mixed latents.

    y[t, h] = act(weight[h] x[t, h])          fp32 sums, one rounding

Source: absorption of the value projection, DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, heads, outputs, width = (cell[axis] for axis in ("T", "H", "M", "K"))
    kv_b = make.normal(heads, 2 * outputs, width, scale=width**-0.5)
    return {"x": make.normal(tokens, heads * width), "weight": kv_b[:, outputs:]}


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, heads, outputs, width = (sizes[axis] for axis in "THMK")
    values = tokens * heads * (width + outputs) + heads * outputs * width
    return Cost(bytes=values * sizes["act"], flops=2 * tokens * heads * outputs * width)


CONTRACT = Contract(
    axes={"T": "tokens", "H": "heads", "K": "inputs of a head", "M": "outputs of a head"},
    args={"x": Arg("T H*K", layout="rows"), "weight": Arg("H M K", layout="any")},
    returns={"y": Arg("T H*M")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano drafter, a block", ("tp1",), T=7, H=4, M=64, K=128),
        Cell("K3 MLA drafter, rank of 16", ("tp16_moetp4ep4",), T=7, H=4, M=128, K=512),
        Cell("nothing to do", ("tp1",), T=0, H=2, M=8, K=16),
    ),
    tolerance=Tolerance(
        element_ulps=2,
        rms_ulps=1.5,
        fp32_element_ulps=40,
        fp32_rms_ulps=12,
        why="one rounding, and an fp32 sum over K in any order",
    ),
)
