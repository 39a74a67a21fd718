"""Folds the accepted drafts of a verify step into the slots, before a checkpoint, a preemption or a
transfer.

    for d = 0 .. pending - 1:   S = S * exp(g_d);  S = S + beta_d * (v_d - S k_d) k_d^T      fp32
    window = raw rows pending .. pending + W - 2

Afterwards the slot is what kda_decode would have left after the same tokens. Records stay.

Source: derived from kda_verify.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance
from tercel.contract.contract import InputMaker
from tercel.ops._lib.kda import check_pending, draw_pending, draw_records, draw_state


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    slots = make.choice(cell["R"], low=1, high=cell["SLOTS"])
    pending = draw_pending(make, cell["R"], cell["D"])
    return {
        **draw_state(cell, make, slots, cell["S"]),
        **draw_records(cell, make, slots, pending),
        "slots": slots,
        "pending": pending,
    }


def valid(
    *,
    recurrent: torch.Tensor,
    draft_k: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
    **_: Any,
) -> None:
    check_pending(slots, pending, count=recurrent.shape[0], drafts=draft_k.shape[1])


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
    valid=valid,
    cells=(
        Cell("nano", layouts=("tp1",), R=3, H=4, K=128, V=128, D=3, S=6, SLOTS=5),
        Cell(
            "K3 rank of 16, seven drafts",
            layouts=("tp16_moetp4ep4",),
            R=1,
            H=6,
            K=128,
            V=128,
            D=7,
            S=10,
            SLOTS=3,
        ),
        Cell("no drafts: nothing to do", layouts=("tp1",), R=2, H=2, K=16, V=32, D=0, S=3, SLOTS=4),
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
        Hazard("call_order", "pending must be zero for the slot's next step; nothing raises"),
    ),
)
