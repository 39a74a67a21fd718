"""moe/experts_grouped for the few tokens of a decode step; nothing is read on the host.

    h_i = act(w13[e_i] @ z)                     e_i = ids[i] - first_expert, fp32 sums
    a_i = activation(h_i)                       rounded as situ_mul or silu_mul round
    t_i = act(w2[e_i] @ a_i)
    y   = act(sum_i weights_i * t_i)            fp32, over the slots, one rounding

Source: as moe/experts_grouped.
"""

from typing import Any

from tercel.contract import Arg, Cell, Contract, Hazard, Value
from tercel.contract.contract import InputMaker
from tercel.ops.moe.experts_grouped.contract import (
    ARGS,
    AXES,
    TOLERANCE,
    WEIGHTS,
    WHERE,
    cost,
    valid,
)
from tercel.ops.moe.experts_grouped.contract import inputs as inputs_of_grouped

MAX_TOKENS = 64
MAX_SLOTS = 16
"""Experts per token."""


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {**inputs_of_grouped(cell, make), "ids_early": bool(cell.get("early"))}


CONTRACT = Contract(
    axes=AXES,
    args={**ARGS, "ids_early": Value(bool, "whether ids are read before the wait")},
    returns={"y": Arg("T L")},
    cost=cost,
    inputs=inputs,
    valid=valid,
    weights=WEIGHTS,
    where=(*WHERE, f"T <= {MAX_TOKENS}", f"k <= {MAX_SLOTS}"),
    cells=(
        Cell("nano decode", ("tp1",), T=1, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("nano batch", ("tp1",), T=8, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("nano, more slots than are gathered", ("tp1",), T=9, k=4, E=16, L=128, I=128),
        Cell("bf16 experts with SiLU", ("tp1",), T=3, k=2, E=6, L=64, I=96, activation="silu"),
        Cell("a quarter of the experts, few slots", T=1, k=4, E=4, L=64, I=32, total=16, first=4),
        Cell("a quarter of the experts", T=5, k=4, E=4, L=64, I=32, total=16, first=12),
        Cell("NVFP4, a second scale per matrix", ("tp1",), T=2, k=4, E=9, L=64, I=32, nvfp4=True),
        Cell("ids early", ("tp1",), T=1, k=4, E=8, L=128, I=128, early=True, mxfp4=True),
        Cell("large bf16 experts", T=3, k=2, E=3, L=512, I=512, activation="silu"),
        Cell("many tokens", ("tp1",), T=40, k=4, E=8, L=256, I=256, mxfp4=True),
        Cell("largest token count", T=MAX_TOKENS, k=2, E=4, L=32, I=32, mxfp4=True),
    ),
    tolerance=TOLERANCE,
    hazards=(
        Hazard("capacity", f"more than {MAX_TOKENS} tokens: use experts_grouped", ("z",), True),
        Hazard(
            "early_read",
            "weights are read before the wait",
            ("w13", "w13_scale", "w2", "w2_scale"),
        ),
        Hazard(
            "early_read",
            "with ids_early, ids choose weights that are read before the wait for the previous "
            "launch. Their writer must be over: since it a launch must have waited before it let "
            "the next start",
            ("ids",),
            when="ids_early",
        ),
    ),
)
