"""Folds the accepted drafts of a verify step into the slots, before a checkpoint, a preemption or a
transfer.

    for d = 0 .. pending - 1:   S = S * exp(g_d);  S = S + beta_d * (v_d - S k_d) k_d^T      fp32
    window = raw rows pending .. pending + W - 2

Afterwards the slot is what kda_decode would have left after the same tokens. Records stay.

Source: derived from kda_verify.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance
from tercel.contract.contract import InputMaker
from tercel.ops._lib.kda import (
    HEAD,
    SMALL_HEAD,
    check_drafts,
    draw_pending,
    draw_records,
    draw_state,
)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    slots = make.choice(cell["R"], low=1, high=cell["SLOTS"])
    pending = draw_pending(make, cell["R"], cell["D"])
    window = cell["W"] - 1 + cell["D"]
    return {
        **draw_state(cell, make, slots, window=window, known=window),
        **draw_records(cell, make, slots, pending),
        "slots": slots,
        "pending": pending,
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    rows, heads, k_dim, v_dim, drafts = (sizes[axis] for axis in "RHKVD")
    window = (2 * sizes["S"] - drafts) * sizes["C"] * sizes["act"]
    records = drafts * heads * (8 * k_dim + v_dim * sizes["act"] + 4)
    return Cost(
        bytes=rows * (window + records + 8 * heads * v_dim * k_dim),
        flops=5 * drafts * rows * heads * v_dim * k_dim,
    )


CONTRACT = Contract(
    axes={
        "R": "rows",
        "H": "heads",
        "K": "key channels of a head",
        "V": "value channels of a head",
        "SLOTS": "slots of the pool; slot 0 is the sink",
        "D": "drafts that a slot remembers at most",
        "S": "W - 1 + D rows of a window",
        "C": "H * (2K + V), the channels of q|k|v",
    },
    args={
        "conv": Arg("SLOTS S C", written="rows 0 .. W - 2 of each slot in slots"),
        "recurrent": Arg("SLOTS H V K", "f32", written="each slot in slots"),
        "draft_k": Arg("SLOTS D H K", "act|f32"),
        "draft_v": Arg("SLOTS D H V"),
        "draft_g": Arg("SLOTS D H K", "f32"),
        "draft_beta": Arg("SLOTS D H", "f32"),
        "slots": Arg("R", "i64"),
        "pending": Arg("R", "i64"),
    },
    returns={},
    where=("C == H * (2 * K + V)", "S > D"),
    keep=("slots",),
    cost=cost,
    inputs=inputs,
    valid=check_drafts,
    cells=(
        Cell("nano, three drafts", ("tp1",), R=3, H=4, D=3, SLOTS=5, **HEAD),
        Cell("K3 rank of 16, seven drafts", ("tp16_moetp4ep4",), R=1, H=6, D=7, SLOTS=3, **HEAD),
        Cell("no drafts: nothing to do", ("tp1",), R=2, H=2, D=0, SLOTS=4, **SMALL_HEAD),
    ),
    tolerance={
        "conv": Tolerance(element_ulps=0, rms_ulps=0, why="rows are moved, not computed"),
        "recurrent": Tolerance(
            element_ulps=48,
            rms_ulps=4,
            why="sums over K and over the drafts in another order, all fp32",
        ),
    },
    hazards=(
        Hazard("aliasing", "two rows with one slot race; nothing raises", ("slots",)),
        Hazard("early_read", "read before the wait", ("slots", "pending")),
        Hazard("call_order", "pending must be zero for the slot's next step; nothing raises"),
    ),
)
