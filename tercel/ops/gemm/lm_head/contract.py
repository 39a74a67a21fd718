"""Logits over this rank's part of the vocabulary, fp32 values of act precision.

    logits = fp32(act(x @ weight^T))          fp32 sums, one rounding to act, then widened

The published model computes logits in act and widens them for sampling; the rounding point is kept
so that greedy texts agree, and every reader of logits sees fp32.
Source: Kimi K3 modeling_kimi_linear.py, lm_head; transformers GenerationMixin.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {
        "x": make.normal(cell["S"], cell["N"]),
        "weight": make.normal(cell["V"], cell["N"], scale=cell["N"] ** -0.5),
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    rows, width, vocabulary = sizes["S"], sizes["N"], sizes["V"]
    moved = (rows + vocabulary) * width * sizes["act"] + 4 * rows * vocabulary
    return Cost(bytes=moved, flops=2 * rows * vocabulary * width)


CONTRACT = Contract(
    axes={"S": "sampled rows", "N": "hidden size", "V": "vocabulary of this rank"},
    args={"x": Arg("S N", layout="rows"), "weight": Arg("V N")},
    returns={"logits": Arg("S V", "f32")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano, one row", ("tp1",), S=1, N=256, V=1280),
        Cell("nano, batch", ("tp1",), S=8, N=256, V=1280),
        Cell("no row is sampled", ("tp1",), S=0, N=64, V=96),
        Cell("K3 rank, part of the shard", ("tp16_moetp4ep4",), S=1, N=7168, V=160),
    ),
    tolerance=Tolerance(
        element_ulps=1.25,
        rms_ulps=0.6,
        fp32_element_ulps=40,
        fp32_rms_ulps=40,
        unit="act",
        why="one rounding of half an ulp to act; fp32 sums of up to 7168 terms, in any order",
    ),
    hazards=(Hazard("early_read", "the weight is read before the wait", ("weight",)),),
)
