"""SwiGLU's gated product.

    y = act(act(gate * sigmoid(gate)) * up)

fp32 inside the SiLU; two roundings, as the published model rounds its activation.
Source: Kimi-Linear modeling_kimi.py, KimiMLP with hidden_act silu.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {"gate_up": make.normal(cell["T"], 2 * cell["I"], scale=2.0)}


def cost(sizes: Mapping[str, int]) -> Cost:
    elements = sizes["T"] * sizes["I"]
    return Cost(bytes=3 * elements * sizes["act"], flops=5 * elements)


CONTRACT = Contract(
    axes={"T": "rows", "I": "intermediate size"},
    args={"gate_up": Arg("T 2*I", layout="rows")},
    returns={"y": Arg("T I")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("small rows", ("tp1",), T=1, I=128),
        Cell("small batch", ("tp1",), T=8, I=128),
        Cell("Kimi-Linear shared expert", ("tp1", "tp2"), T=3, I=1024),
    ),
    tolerance=Tolerance(
        element_ulps=2,
        rms_ulps=1,
        fp32_element_ulps=3,
        fp32_rms_ulps=3,
        why="two roundings of half an ulp; in fp32 the sigmoid and its product round once more",
    ),
)
