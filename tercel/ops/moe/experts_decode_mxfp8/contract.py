"""moe/experts_decode with activations in MXFP8 (W4A8): it reads what moe/route_quantize writes.

    z   = codes * 2 ** (scale - 127)
    a_i = activation(w13[e_i] @ z)              e_i = ids[i] - first_expert; fp32, not rounded
    q_i = MXFP8 of a_i                          tercel.core.mxfp8: 32 columns a scale, rounded up
    t_i = w2[e_i] @ q_i                         fp32, not rounded
    y   = bf16(sum_i weights_i * t_i)           fp32, over the slots, one rounding

Weights are MXFP4, used at their values.
Source: TensorRT-LLM's W4A8_MXFP4_MXFP8 experts, whose activations between the two products are
MXFP8 too; OCP Microscaling formats v1.0.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance
from tercel.contract.contract import InputMaker
from tercel.core import mxfp8
from tercel.ops.moe.experts_decode.contract import CONTRACT as DECODE
from tercel.ops.moe.experts_decode.contract import MAX_SLOTS, MAX_TOKENS
from tercel.ops.moe.experts_decode.contract import inputs as inputs_of_decode

WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale")


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    drawn = inputs_of_decode(cell, make)
    codes, scale = mxfp8.quantize(make.normal(cell["T"], cell["L"], dtype="f32"))
    kept = {name: value for name, value in drawn.items() if name in CONTRACT.args}
    return {"codes": codes, "scale": scale, **kept}


def cost(sizes: Mapping[str, int]) -> Cost:
    """Every slot on a different expert, as far as there are so many."""
    tokens, slots, experts = sizes["T"], sizes["T"] * sizes["k"], sizes["E"]
    stored = sum(sizes[f"{name}_bytes"] for name in WEIGHTS)
    moved = tokens * (3 * sizes["L"] + sizes["L"] // 32) + 12 * slots
    read = stored * min(slots, experts) // experts
    return Cost(bytes=read + moved, flops=6 * slots * sizes["I"] * sizes["L"])


CONTRACT = Contract(
    axes=DECODE.axes,
    args={
        "codes": Arg("T L", "e4m3"),
        "scale": Arg("T L//32", "u8"),
        "ids": DECODE.args["ids"],
        "weights": DECODE.args["weights"],
        "w13": Arg("E 2*I L//2|E I//8 P1 N1 32 4", "u8|i32"),
        "w13_scale": Arg("E 2*I L//32|E I//8 P1 O1 32", "u8|i32"),
        "w2": Arg("E L I//2|E L//16 P2 N2 32 4", "u8|i32"),
        "w2_scale": Arg("E L I//32|E L//16 P2 O2 32", "u8|i32"),
        **{n: DECODE.args[n] for n in ("first_expert", "activation", "beta", "linear_beta")},
        "ids_early": DECODE.args["ids_early"],
    },
    returns={"y": Arg("T L", "bf16")},
    cost=cost,
    inputs=inputs,
    valid=DECODE.valid,
    weights=WEIGHTS,
    where=(
        "w13.dtype == w2.dtype",
        "activation in ('situ', 'silu')",
        "activation == 'silu' or (beta is not None and beta > 0)",
        f"T <= {MAX_TOKENS}",
        f"k <= {MAX_SLOTS}",
    ),
    cells=(
        Cell("nano decode", ("tp1",), T=1, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell("nano batch", ("tp1",), T=8, k=4, E=16, L=128, I=128, mxfp4=True),
        Cell(
            "SiLU, more slots than are gathered",
            T=9,
            k=4,
            E=16,
            L=128,
            I=96,
            activation="silu",
            mxfp4=True,
        ),
        Cell("a quarter of the experts", T=5, k=4, E=4, L=64, I=32, total=16, first=12, mxfp4=True),
        Cell("two tokens of narrow experts", T=2, k=4, E=4, L=64, I=192, early=True, mxfp4=True),
        Cell("largest token count", T=MAX_TOKENS, k=2, E=4, L=32, I=32, mxfp4=True),
    ),
    tolerance=Tolerance(
        element_ulps=8,
        rms_ulps=4,
        why="one rounding of half an ulp, and codes of a_i that an error in fp32 moves: about one "
        "in 10^5, by up to an eighth of its value, averaged by the sum over 32 columns or more: "
        "what one moved code does in the narrowest cells",
    ),
    hazards=(
        *DECODE.hazards,
        Hazard(
            "range",
            "kernels hold values below 2 ** 37; a larger one makes its row infinite or not a "
            "number",
            ("scale",),
        ),
    ),
)
