"""The log decay of every key channel of a KDA layer.

    a = f + dt_bias
    g = lower_bound * sigmoid(exp(A_log) * a)        Kimi K3, lower_bound -5: the decay is > e^-5
    g = -exp(A_log) * softplus(a)                    Kimi-Linear, lower_bound None

A_log is one number per head, dt_bias one per channel; everything is fp32 and g stays fp32. The
first form replaces the second, it does not clamp it.

Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention (gate_lower_bound); Kimi Linear,
arXiv 2510.26692.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.kda import draw_gate


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {
        "f": make.normal(cell["T"], cell["H"] * cell["K"], scale=2.0),
        **draw_gate(make, cell["H"], cell["K"]),
        "lower_bound": cell["lower_bound"],
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    channels = sizes["P"]
    return Cost(
        bytes=sizes["T"] * channels * (sizes["act"] + 4) + 4 * (channels + sizes["H"]),
        flops=10 * sizes["T"] * channels,
    )


CONTRACT = Contract(
    axes={"T": "tokens", "H": "heads", "K": "key channels of a head", "P": "H * K"},
    args={
        "f": Arg("T P", layout="rows"),
        "A_log": Arg("H", "f32"),
        "dt_bias": Arg("P", "f32"),
        "lower_bound": Value((float, type(None)), "-5.0 for K3; None: the softplus form"),
    },
    returns={"g": Arg("T H P//H", "f32")},
    where=("P % H == 0", "lower_bound is None or lower_bound < 0"),
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano prefill", layouts=("tp1",), T=33, H=4, K=128, lower_bound=-5.0),
        Cell(
            "K3 rank of 16, one token",
            layouts=("tp16_moetp4ep4",),
            T=1,
            H=6,
            K=128,
            lower_bound=-5.0,
        ),
        Cell("Kimi-Linear", layouts=("tp1",), T=7, H=32, K=128, lower_bound=None),
    ),
    tolerance=Tolerance(
        element_ulps=12,
        rms_ulps=3,
        why="the rounding of exp(A_log) * a, up to 16 * 8, is an absolute error of the logarithm "
        "of the sigmoid; where that is large g is near one of its ends and hides most of it",
    ),
    hazards=(Hazard("early_read", "read before the wait", ("A_log", "dt_bias")),),
)
