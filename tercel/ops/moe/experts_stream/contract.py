"""moe/experts_decode for one or two tokens whose experts stream from memory once.

Two tokens are taken where experts are narrow and all of them are on every rank: then both may want
the same expert, whose second read comes from the cache.
Source: as moe/experts_grouped.
"""

from dataclasses import replace

from tercel.contract import Cell, Hazard
from tercel.ops.moe.experts_decode.contract import CONTRACT as DECODE
from tercel.ops.moe.experts_decode.contract import MAX_TOKENS as MOST_OF_DECODE

MAX_TOKENS = 2
MAX_WIDTH_OF_TWO = 256
"""Widest expert of a call with two tokens."""

CONTRACT = replace(
    DECODE,
    where=(
        *(condition for condition in DECODE.where if condition != f"T <= {MOST_OF_DECODE}"),
        f"T <= {MAX_TOKENS}",
        f"T == 1 or I <= {MAX_WIDTH_OF_TWO}",
    ),
    cells=(
        Cell("nano, one token", ("tp1",), T=1, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("nano, two tokens", ("tp1",), T=2, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("the same experts twice", T=2, k=4, E=4, L=64, I=64, mxfp4=True),
        Cell("one wide token", T=1, k=2, E=4, L=64, I=320, total=8, first=2, mxfp4=True),
        Cell("bf16 experts with SiLU", T=2, k=2, E=3, L=32, I=24, activation="silu"),
    ),
    hazards=(
        *(hazard for hazard in DECODE.hazards if hazard.kind != "capacity"),
        Hazard(
            "capacity", "three tokens, or two of wide experts: use experts_decode", ("z",), True
        ),
    ),
)
