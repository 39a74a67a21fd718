"""moe/experts_grouped for one or two tokens whose experts stream from memory once.

    h_i = act(w13[e_i] @ z)                     e_i = ids[i] - first_expert, fp32 sums
    a_i = activation(h_i)                       rounded as situ_mul or silu_mul round
    t_i = act(w2[e_i] @ a_i)
    y   = act(sum_i weights_i * t_i)            fp32, over the slots, one rounding

Two tokens are taken where experts are narrow and all of them are on every rank: then both may want
the same expert, whose second read comes from the cache.
Source: as moe/experts_grouped.
"""

from tercel.contract import Arg, Cell, Contract, Hazard
from tercel.ops.moe.experts_grouped.contract import (
    ARGS,
    AXES,
    TOLERANCE,
    WEIGHTS,
    WHERE,
    cost,
    inputs,
    valid,
)

MAX_TOKENS = 2
MAX_SLOTS = 16
"""Experts per token."""
MAX_WIDTH_OF_TWO = 256
"""Widest expert of a call with two tokens."""

CONTRACT = Contract(
    axes=AXES,
    args=ARGS,
    returns={"y": Arg("T L")},
    cost=cost,
    inputs=inputs,
    valid=valid,
    weights=WEIGHTS,
    where=(
        *WHERE,
        f"T <= {MAX_TOKENS}",
        f"T == 1 or I <= {MAX_WIDTH_OF_TWO}",
        f"k <= {MAX_SLOTS}",
    ),
    cells=(
        Cell("nano, one token", ("tp1",), T=1, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("nano, two tokens", ("tp1",), T=2, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("the same experts twice", T=2, k=4, E=4, L=64, I=64, mxfp4=True),
        Cell("one wide token", T=1, k=2, E=4, L=64, I=320, total=8, first=2, mxfp4=True),
        Cell("bf16 experts with SiLU", T=2, k=2, E=3, L=32, I=24, activation="silu"),
    ),
    tolerance=TOLERANCE,
    hazards=(
        Hazard(
            "early_read",
            "weights are read before the wait",
            ("w13", "w13_scale", "w2", "w2_scale"),
        ),
        Hazard(
            "capacity", "three tokens, or two of wide experts: use experts_decode", ("z",), True
        ),
    ),
)
