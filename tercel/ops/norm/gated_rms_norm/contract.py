"""The output norm of KDA: RMSNorm per head, times a sigmoid gate per channel.

    y = act(o * rsqrt(mean_V(o**2) + eps) * weight * sigmoid(gate))      fp32 inside, one rounding

The weight is shared by the heads and stays fp32.
Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.o_norm; FLA FusedRMSNormGated.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, heads, channels = cell["T"], cell["H"], cell["V"]
    gate = make.normal(tokens, heads * channels + cell.get("spare", 0), scale=2.0)
    return {
        "o": make.normal(tokens, heads, channels),
        "gate": gate[:, : heads * channels],
        "weight": make.uniform(channels, low=0.5, high=1.5, dtype="f32"),
        "eps": 1e-5,
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    elements = sizes["T"] * sizes["H"] * sizes["V"]
    return Cost(bytes=3 * elements * sizes["act"] + 4 * sizes["V"], flops=8 * elements)


CONTRACT = Contract(
    axes={"T": "tokens", "H": "heads", "V": "channels of a head"},
    args={
        "o": Arg("T H V"),
        "gate": Arg("T H*V", layout="rows"),
        "weight": Arg("V", "f32"),
        "eps": Value(float, "inside the root"),
    },
    returns={"y": Arg("T H*V")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano decode", ("tp1",), T=1, H=4, V=128),
        Cell("nano batch", ("tp1",), T=8, H=4, V=128),
        Cell(
            "K3 rank, gate inside a fused projection", ("tp16_moetp4ep4",), T=5, H=6, V=128, spare=8
        ),
    ),
    tolerance=Tolerance(
        element_ulps=1.25,
        rms_ulps=0.6,
        fp32_element_ulps=4,
        fp32_rms_ulps=4,
        why="one rounding of half an ulp; in fp32 each of the norm, the weight, the sigmoid and "
        "the product rounds once more",
    ),
    hazards=(Hazard("early_read", "the weight is read before the wait", ("weight",)),),
)
