"""A KDA layer's core for one token per row: convolution, gate, recurrence and gated norm.

    y = act(silu(conv(window | qkv)))           the window moves on by this row     causal_conv1d
    g = gate(f, A_log, dt_bias)                 fp32                                kda_gate
    q, k, v = y; l2norm of q and k; beta = sigmoid(b)
    S = S * exp(g);  S = S + beta * (v - S k) k^T;  o = S q                         kda_prefill
    out = act(o * rsqrt(mean(o**2) + eps) * o_norm * sigmoid(gate))   mean over V, per head

Everything is fp32 but for the two roundings shown; o is not rounded before its norm, as in the
fused kernels of the field (the layered form of the published code rounds it there once more).

Rows whose slot is the sink, 0, are padding: any number of them, outputs unspecified but finite as
long as the pool was created as zeros, live slots untouched. A slot with drafts pending belongs to
kda_verify or kda_commit first.

Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.kda import HEAD, SMALL_HEAD, draw_layer, draw_state
from tercel.ops._lib.pools import check_slots


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    slots = make.choice(cell["R"], low=1, high=cell["SLOTS"])
    return {
        **draw_layer(cell, make, cell["R"]),
        **draw_state(cell, make, slots, window=cell["S"], known=cell["W"] - 1),
        "slots": slots,
        "lower_bound": cell["lower_bound"],
        "eps": 1e-5,
    }


def valid(*, recurrent: torch.Tensor, slots: torch.Tensor, **_: Any) -> None:
    check_slots(slots, recurrent.shape[0])


def cost(sizes: Mapping[str, int]) -> Cost:
    rows, heads, k_dim, v_dim, taps = (sizes[axis] for axis in "RHKVW")
    channels = heads * (2 * k_dim + v_dim)
    activations = rows * (channels * (1 + 2 * (taps - 1)) + heads * (2 * v_dim + k_dim + 1))
    weights = channels * taps + heads * (k_dim + 1) + v_dim
    return Cost(
        bytes=activations * sizes["act"] + 4 * weights + 8 * rows * heads * v_dim * k_dim,
        flops=7 * rows * heads * v_dim * k_dim,
    )


CONTRACT = Contract(
    axes={
        "R": "rows, one token each",
        "H": "heads",
        "K": "key channels of a head",
        "V": "value channels of a head",
        "C": "H * (2K + V), the channels of q|k|v",
        "W": "taps of the convolution",
        "SLOTS": "slots of the pool; slot 0 is the sink",
        "S": "rows of a window; those after the first W - 1 are not touched",
    },
    args={
        "qkv": Arg("R C", layout="rows"),
        "gate": Arg("R H*V", layout="rows"),
        "f": Arg("R H*K", layout="rows"),
        "b": Arg("R H", layout="rows"),
        "conv_weight": Arg("C W", "f32", layout="any"),
        "A_log": Arg("H", "f32"),
        "dt_bias": Arg("H*K", "f32"),
        "o_norm": Arg("V", "f32"),
        "conv": Arg("SLOTS S C", written="rows 0 .. W - 2 of each slot in slots"),
        "recurrent": Arg("SLOTS H V K", "f32", written="each slot in slots"),
        "slots": Arg("R", "i64"),
        "lower_bound": Value((float, type(None)), "-5.0 for K3; None: the Kimi-Linear form"),
        "eps": Value(float, "of the gated norm, 1e-5"),
    },
    returns={"out": Arg("R H*V")},
    where=("C == H * (2 * K + V)", "S >= W - 1", "lower_bound is None or lower_bound < 0"),
    keep=("slots",),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano, a batch", ("tp1",), R=5, H=4, S=3, SLOTS=9, lower_bound=-5.0, **HEAD),
        Cell(
            "K3 rank of 16, one request, drafts' rows behind the window",
            ("tp16_moetp4ep4", "tp16_moetp16ep1"),
            **{"R": 1, "H": 6, "S": 10, "SLOTS": 3, "lower_bound": -5.0, **HEAD},
        ),
        Cell(
            "Kimi-Linear's gate, values wider than keys",
            (),
            **{"R": 3, "H": 2, "S": 3, "SLOTS": 5, "lower_bound": None, **SMALL_HEAD},
        ),
    ),
    tolerance={
        "out": Tolerance(
            element_ulps=16,
            rms_ulps=3,
            fp32_element_ulps=48,
            fp32_rms_ulps=8,
            why="the gated norm divides by the size of o, which may be a small rest of the terms "
            "of S q; before that, sums over K and one rounding of the convolution",
        ),
        "conv": Tolerance(element_ulps=0, rms_ulps=0, why="rows are moved, not computed"),
        "recurrent": Tolerance(
            element_ulps=8,
            rms_ulps=2,
            fp32_element_ulps=40,
            fp32_rms_ulps=4,
            why="one rounding of q, k, v to activations, and the sum S k over K",
            unit="act",
        ),
    },
    hazards=(
        Hazard("aliasing", "two rows with one live slot race; nothing raises", ("slots",)),
        Hazard(
            "early_read",
            "read before the wait",
            ("conv_weight", "A_log", "dt_bias", "o_norm", "slots"),
        ),
        Hazard("stale_state", "drafts that are pending in a slot are lost; nothing raises"),
    ),
)
