"""The routed experts of this rank with activations in e4m3 (W4A8): lossy, and never a default.

    q(x) = x rounded to e4m3 times one power of two a row, the smallest that saturates nothing
    h_i = act(w13[e_i] @ q(z))                  e_i = ids[i] - first_expert, fp32 sums
    a_i = act(activation(h_i))
    t_i = act(w2[e_i] @ q(a_i))
    y   = act(sum_i weights_i * t_i)            fp32, over the slots in order, one rounding

Weights are MXFP4 and used at their values, but that a scale below 2 ** -11 of its row's largest
counts as that: what a row spans fits e4m3 then. Slots of other ranks' experts add nothing.
Source: Kimi K3 modeling_kimi_linear.py, KimiSparseMoeBlock; one scale a token as in public W4A8
kernels.
"""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from tercel.contract import Arg, Cell, Contract, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops.moe.experts_grouped import contract as exact

WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale", "w13_largest", "w2_largest")
ARGS: Mapping[str, Arg | Value] = {
    "z": Arg("T L"),
    "ids": Arg("T k", "i64"),
    "weights": Arg("T k", "f32"),
    "w13": Arg("E 2*I L//2|E I//8 P1 N1 32 4", "u8|i32"),
    "w13_scale": Arg("E 2*I L//32|E I//8 P1 O1 32", "u8|i32"),
    "w2": Arg("E L I//2|E L//16 P2 N2 32 4", "u8|i32"),
    "w2_scale": Arg("E L I//32|E L//16 P2 O2 32", "u8|i32"),
    "w13_largest": Arg("E 2*I", "u8", optional=True),
    "w2_largest": Arg("E L", "u8", optional=True),
    "first_expert": Value(int, "id of this rank's first expert"),
    "activation": Value(str, "situ or silu"),
    "beta": Value((float, NoneType), "of situ"),
    "linear_beta": Value((float, NoneType), "of situ"),
}
TOLERANCE = Tolerance(
    element_ulps=32,
    rms_ulps=10,
    fp32_element_ulps=400_000,
    fp32_rms_ulps=40_000,
    why="e4m3 has a sixteenth of the steps of bf16: where h's own rounding, or a sum's, takes an "
    "element across a boundary, it moves by up to an eighth. In bf16 some in a hundred do, as much "
    "as e4m3 itself rounds, so that fp32 alone tells its roundings from none: there one among "
    "thousands may",
)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    mxfp4 = Cell(cell.why, cell.layouts, **{**cell.sizes, "mxfp4": True})
    drawn = exact.inputs(mxfp4, make)
    kept = {name: value for name, value in drawn.items() if not name.endswith("scale_2")}
    return {**kept, "w13_largest": None, "w2_largest": None}


CONTRACT = Contract(
    axes=exact.AXES,
    args=ARGS,
    returns={"y": Arg("T L")},
    cost=exact.cost,
    inputs=inputs,
    where=(
        "w13.dtype == w2.dtype",
        "w13_scale.dtype == w13.dtype",
        "w2_scale.dtype == w2.dtype",
        "(w13_largest is None) == (w13.element_size() == 1)",
        "(w2_largest is None) == (w2.element_size() == 1)",
        *exact.WHERE[-2:],
    ),
    valid=exact.valid,
    weights=WEIGHTS,
    cells=(
        Cell("nano prefill", ("tp1",), T=41, k=4, E=16, L=128, I=128),
        Cell("nano, one token", ("tp1",), T=1, k=4, E=16, L=128, I=128),
        Cell("a quarter of the experts", T=23, k=4, E=4, L=64, I=32, total=16, first=4),
        Cell("experts with SiLU", T=19, k=2, E=6, L=64, I=96, activation="silu"),
        Cell("blocks of slots", T=20, k=2, E=4, L=512, I=512),
        Cell("no token on this rank", T=2, k=2, E=1, L=64, I=32, total=9, first=9),
        Cell("two blocks of two pieces", T=100, k=2, E=2, L=768, I=768),
    ),
    tolerance=TOLERANCE,
)
