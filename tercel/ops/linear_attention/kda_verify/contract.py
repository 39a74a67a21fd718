"""A KDA layer's core for a certain token and its drafts per row, with deferred acceptance.

A slot holds the state after the first token of its latest step, and that step's drafts as records:
normalised key, value, log decay, beta, and the raw rows behind the window. `pending` of them were
accepted since. A step

    1. folds the pending records into the state, in order, and moves the window on by as many rows;
    2. runs its first token as kda_decode does, and commits state and window;
    3. runs drafts 1 .. width - 1 from a running copy: outputs, records and raw rows, no state.

So rejecting drafts costs nothing, and any accepted prefix gives what decoding token by token gives.
Roundings are those of kda_decode; a record's key keeps the dtype of draft_k. Padding as there.

Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.kda import (
    HEAD,
    SMALL_HEAD,
    check_drafts,
    draw_layer,
    draw_pending,
    draw_records,
    draw_state,
)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    width, rows, past = cell["width"], cell["R"], cell["W"] - 1
    slots = make.choice(rows, low=1, high=cell["SLOTS"])
    pending = draw_pending(make, rows, width - 1)
    return {
        **draw_layer(cell, make, rows * width),
        **draw_state(cell, make, slots, window=past + cell["D"], known=past + width - 1),
        **draw_records(cell, make, slots, pending),
        "slots": slots,
        "pending": pending,
        "width": width,
        "lower_bound": cell["lower_bound"],
        "eps": 1e-5,
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    rows, heads, k_dim, v_dim, channels, taps = (sizes[axis] for axis in "RHKVCW")
    tokens, drafts = rows * sizes["width"], sizes["width"] - 1
    activations = tokens * (channels + heads * (2 * v_dim + k_dim + 1))
    windows = 2 * rows * (taps - 1 + drafts) * channels
    records = 2 * rows * drafts * heads * (8 * k_dim + v_dim * sizes["act"] + 4)
    state = 8 * rows * heads * v_dim * k_dim + 4 * (channels * taps + heads * (k_dim + 1) + v_dim)
    return Cost(
        bytes=(activations + windows) * sizes["act"] + records + state,
        flops=7 * (tokens + rows * drafts) * heads * v_dim * k_dim,
    )


CONTRACT = Contract(
    axes={
        "R": "rows, width tokens each",
        "H": "heads",
        "K": "key channels of a head",
        "V": "value channels of a head",
        "C": "H * (2K + V), the channels of q|k|v",
        "W": "taps of the convolution",
        "SLOTS": "slots of the pool; slot 0 is the sink",
        "D": "drafts that a slot remembers at most",
    },
    args={
        "qkv": Arg("R*width C", layout="rows"),
        "gate": Arg("R*width H*V", layout="rows"),
        "f": Arg("R*width H*K", layout="rows"),
        "b": Arg("R*width H", layout="rows"),
        "conv_weight": Arg("C W", "f32", layout="any"),
        "A_log": Arg("H", "f32"),
        "dt_bias": Arg("H*K", "f32"),
        "o_norm": Arg("V", "f32"),
        "conv": Arg("SLOTS W-1+D C", written="rows 0 .. W + width - 3 of each slot in slots"),
        "recurrent": Arg("SLOTS H V K", "f32", written="each slot in slots"),
        "draft_k": Arg("SLOTS D H K", "act|f32", written="drafts 0 .. width - 2 of each slot"),
        "draft_v": Arg("SLOTS D H V", written="drafts 0 .. width - 2 of each slot"),
        "draft_g": Arg("SLOTS D H K", "f32", written="drafts 0 .. width - 2 of each slot"),
        "draft_beta": Arg("SLOTS D H", "f32", written="drafts 0 .. width - 2 of each slot"),
        "slots": Arg("R", "i64"),
        "pending": Arg("R", "i64"),
        "width": Value(int, "tokens per row, 1 .. 1 + D"),
        "lower_bound": Value((float, type(None)), "-5.0 for K3; None: the Kimi-Linear form"),
        "eps": Value(float, "of the gated norm, 1e-5"),
    },
    returns={"out": Arg("R*width H*V")},
    where=(
        "C == H * (2 * K + V)",
        "1 <= width <= 1 + D",
        "lower_bound is None or lower_bound < 0",
    ),
    keep=("slots",),
    cost=cost,
    inputs=inputs,
    valid=check_drafts,
    cells=(
        Cell(
            "nano, three drafts",
            ("tp1",),
            **{"R": 3, "width": 4, "H": 4, "D": 3, "SLOTS": 6, "lower_bound": -5.0, **HEAD},
        ),
        Cell(
            "K3 rank of 16, one request, seven drafts",
            ("tp16_moetp4ep4",),
            **{"R": 1, "width": 8, "H": 6, "D": 7, "SLOTS": 3, "lower_bound": -5.0, **HEAD},
        ),
        Cell(
            "fewer drafts than there is room for, Kimi-Linear's gate",
            (),
            **{"R": 3, "width": 3, "H": 2, "D": 5, "SLOTS": 5, "lower_bound": None, **SMALL_HEAD},
        ),
        Cell(
            "no room for drafts: decode",
            (),
            **{"R": 2, "width": 1, "H": 2, "D": 0, "SLOTS": 5, "lower_bound": -5.0, **SMALL_HEAD},
        ),
    ),
    tolerance={
        "out": Tolerance(
            element_ulps=16,
            rms_ulps=3,
            fp32_element_ulps=80,
            fp32_rms_ulps=9,
            why="as kda_decode, along up to 2D + 1 tokens, whose products are summed in chunks",
        ),
        "conv": Tolerance(element_ulps=0, rms_ulps=0, why="rows are moved, not computed"),
        "recurrent": Tolerance(
            element_ulps=16,
            rms_ulps=2,
            fp32_element_ulps=40,
            fp32_rms_ulps=4,
            why="as kda_decode, along up to D + 1 tokens",
            unit="act",
        ),
        "draft_k": Tolerance(
            element_ulps=4,
            rms_ulps=1.5,
            fp32_element_ulps=12,
            fp32_rms_ulps=3,
            why="the convolution's rounding passes through the normalisation",
            unit="act",
        ),
        "draft_v": Tolerance(element_ulps=8, rms_ulps=2, why="as causal_conv1d, of the same rows"),
        "draft_g": Tolerance(element_ulps=12, rms_ulps=3, why="as kda_gate, from the same f"),
        "draft_beta": Tolerance(element_ulps=4, rms_ulps=2, why="a sigmoid of b in fp32"),
    },
    hazards=(
        Hazard("aliasing", "two rows with one live slot race; nothing raises", ("slots",)),
        Hazard("early_read", "read before the wait", ("conv_weight", "A_log", "dt_bias", "slots")),
        Hazard("call_order", "pending counts the drafts of the slot's latest step"),
    ),
)
