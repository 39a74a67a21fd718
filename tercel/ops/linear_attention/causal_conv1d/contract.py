"""Depthwise causal convolution of sequences, then SiLU; the window of each is carried in a pool.

    z[t, c] = sum_j weight[c, j] * x[t - (W - 1) + j, c]        the last tap meets the current token
    y = act(z * sigmoid(z))                                     fp32 inside, one rounding

Rows before a sequence's first token come from its slot, or are zero where it is fresh. Afterwards
the slot holds its last W - 1 raw rows, older ones of the slot included where a chunk is shorter.

Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention (short convolution, no bias).
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.pools import check_cu_seqlens, check_slots, draw_pool


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    channels, taps, bounds = cell["C"], cell["W"], cell["cu_seqlens"]
    fresh = tuple(row % 2 == 1 for row in range(len(bounds) - 1))
    live = [row for row, is_fresh in enumerate(fresh) if not is_fresh]
    slots = make.choice(len(fresh), low=1, high=cell["SLOTS"])
    windows = make.poison(len(live), cell["S"], channels)
    windows[:, : taps - 1] = make.normal(len(live), taps - 1, channels)
    return {
        "x": make.normal(bounds[-1], channels),
        "weight": make.normal(channels, taps, dtype="f32"),
        "state": draw_pool(make, cell["SLOTS"], slots[live], windows, "act"),
        "slots": slots,
        "cu_seqlens": bounds,
        "fresh": fresh,
    }


def valid(
    *, state: torch.Tensor, slots: torch.Tensor, cu_seqlens: tuple[int, ...], **_: Any
) -> None:
    check_slots(slots, state.shape[0])
    check_cu_seqlens(cu_seqlens)


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, channels, taps = sizes["T"], sizes["C"], sizes["W"]
    rows = 2 * tokens + 2 * sizes["N"] * (taps - 1)
    return Cost(
        bytes=rows * channels * sizes["act"] + 4 * channels * taps,
        flops=(2 * taps + 4) * tokens * channels,
    )


def _bounds(*lengths: int) -> tuple[int, ...]:
    return tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))


CONTRACT = Contract(
    axes={
        "T": "tokens of all sequences",
        "C": "channels, 3P for q|k|v",
        "W": "taps",
        "S": "rows of a slot; those after the first W - 1 are not touched",
        "N": "sequences",
        "SLOTS": "slots of the pool; slot 0 is the sink",
    },
    args={
        "x": Arg("T C", layout="rows"),
        "weight": Arg("C W", "f32", layout="any"),
        "state": Arg("SLOTS S C", written="rows 0 .. W - 2 of each slot in slots"),
        "slots": Arg("N", "i64"),
        "cu_seqlens": Value(tuple, "sequence n is tokens cu_seqlens[n] .. cu_seqlens[n + 1]"),
        "fresh": Value(tuple, "whether a sequence starts here; its slot is then not read"),
    },
    returns={"y": Arg("T C")},
    where=(
        "len(cu_seqlens) == N + 1",
        "len(fresh) == N",
        "cu_seqlens[-1] == T",
        "S >= W - 1",
    ),
    keep=("slots",),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell(
            "nano, sequences shorter than the window and empty ones among them",
            layouts=("tp1",),
            C=1536,
            W=4,
            S=3,
            SLOTS=9,
            cu_seqlens=_bounds(5, 1, 2, 17, 3, 0, 0),
        ),
        Cell(
            "K3 rank of 16, drafts' rows behind the window",
            layouts=("tp16_moetp4ep4",),
            C=2304,
            W=4,
            S=10,
            SLOTS=4,
            cu_seqlens=_bounds(33, 64),
        ),
    ),
    tolerance=Tolerance(
        element_ulps=4,
        rms_ulps=1.5,
        why="fp32 sum of four products, sigmoid and product, one rounding; a row's largest element "
        "may sit just above a power of two; in fp32 the sum's own roundings count as well",
    ),
    hazards=(
        Hazard("aliasing", "two rows with one slot race; nothing raises", ("slots",)),
        Hazard("early_read", "the weight is read before the wait", ("weight",)),
        Hazard("stale_state", "a fresh sequence that is not marked continues the slot's last one"),
    ),
)
