"""KDA over sequences: the gated delta rule on a state per head that each sequence carries on.

    q = l2norm(q) * K**-0.5     k = l2norm(k)        x / sqrt(sum(x**2) + 1e-6), fp32, not rounded
    beta = sigmoid(b)                                fp32
    S = S * exp(g)                                   [H, V, K] fp32, decay per key channel
    S = S + beta * (v - S k) k^T
    o = act(S q)                                     the updated state; one rounding

Some published kernels round q and k to activations after normalising; here they stay fp32. A
fresh sequence starts from zeros whatever its slot holds.

Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention; Kimi Linear, arXiv 2510.26692, eq. 1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.pools import check_cu_seqlens, check_slots, draw_pool


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    heads, k_dim, v_dim, bounds = cell["H"], cell["K"], cell["V"], cell["cu_seqlens"]
    tokens, rows = bounds[-1], len(bounds) - 1
    fresh = tuple(row % 2 == 1 for row in range(rows))
    live = [row for row in range(rows) if not fresh[row]]
    slots = make.choice(rows, low=1, high=cell["SLOTS"])
    states = make.normal(len(live), heads, v_dim, k_dim, scale=0.3, dtype="f32")
    qkv = make.normal(tokens, heads * (2 * k_dim + v_dim))
    qkv[::3, : 2 * heads * k_dim] *= 1e-3  # q and k short enough for eps to count
    return {
        "qkv": qkv,
        "g": make.uniform(tokens, heads, k_dim, low=cell["g_min"], high=0.0, dtype="f32"),
        "b": make.normal(tokens, heads, scale=2.0),
        "state": draw_pool(make, cell["SLOTS"], slots[live], states, "f32"),
        "slots": slots,
        "cu_seqlens": bounds,
        "fresh": fresh,
    }


def valid(
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: tuple[int, ...],
    **_: Any,
) -> None:
    check_slots(slots, state.shape[0])
    check_cu_seqlens(cu_seqlens)


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, heads, k_dim, v_dim = (sizes[axis] for axis in "THKV")
    rows = tokens * heads * (2 * k_dim + 2 * v_dim + 1)
    return Cost(
        bytes=rows * sizes["act"]
        + 4 * tokens * heads * k_dim
        + 8 * sizes["N"] * heads * v_dim * k_dim,
        flops=7 * tokens * heads * v_dim * k_dim,
    )


CONTRACT = Contract(
    axes={
        "T": "tokens of all sequences",
        "H": "heads",
        "K": "key channels of a head",
        "V": "value channels of a head",
        "N": "sequences",
        "SLOTS": "slots of the pool; slot 0 is the sink",
    },
    args={
        "qkv": Arg("T H*(2*K+V)", layout="rows"),
        "g": Arg("T H K", "f32"),
        "b": Arg("T H", layout="rows"),
        "state": Arg("SLOTS H V K", "f32", written="each slot in slots"),
        "slots": Arg("N", "i64"),
        "cu_seqlens": Value(tuple, "sequence n is tokens cu_seqlens[n] .. cu_seqlens[n + 1]"),
        "fresh": Value(tuple, "whether a sequence starts here; its slot is then not read"),
    },
    returns={"o": Arg("T H V")},
    where=("len(cu_seqlens) == N + 1", "len(fresh) == N", "cu_seqlens[-1] == T"),
    keep=("slots",),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell(
            "nano: a chunk and a half, fresh, one token, fresh, none, all in one step",
            layouts=("tp1",),
            H=4,
            K=128,
            V=128,
            SLOTS=7,
            g_min=-1.0,
            cu_seqlens=(0, 97, 130, 131, 147, 147),
        ),
        Cell(
            "K3 rank of 16 with decays down to the bound",
            layouts=("tp16_moetp4ep4",),
            H=6,
            K=128,
            V=128,
            SLOTS=3,
            g_min=-5.0,
            cu_seqlens=(0, 80),
        ),
        Cell("values wider than keys", H=2, K=16, V=32, SLOTS=4, g_min=-2.0, cu_seqlens=(0, 9, 40)),
    ),
    tolerance={
        "o": Tolerance(
            element_ulps=32,
            rms_ulps=2,
            fp32_element_ulps=256,
            fp32_rms_ulps=6,
            why="sums over K and over a chunk's tokens in another order; errors pass from token to "
            "token without growing. A row may be a small rest of large terms: the naive form "
            "itself reaches 160 there in fp32. In bf16 a chunk's scores are rounded before they "
            "meet v, and among a million rows some are a tenth of their terms; the rms, which is "
            "that of the last rounding, shows anything that is wrong in more than a few rows",
        ),
        "state": Tolerance(
            element_ulps=8,
            rms_ulps=2,
            fp32_element_ulps=24,
            fp32_rms_ulps=4,
            why="as o, without the cancellation; kernels may multiply in activations",
            unit="act",
        ),
    },
    hazards=(
        Hazard("aliasing", "two rows with one slot race; nothing raises", ("slots",)),
        Hazard("stale_state", "a fresh sequence that is not marked continues the slot's last one"),
        Hazard("range", "g above 0 grows the state without bound; nothing raises", ("g",)),
    ),
)
