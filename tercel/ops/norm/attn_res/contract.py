"""Selection over the attention residuals: a softmax mixture of snapshots and the prefix sum.

    v       = [bank_0, ..., bank_{S-1}, prefix]
    score_i = sum_d v_i[d] * rsqrt(mean(v_i**2) + eps) * (res_norm[d] * res_proj[d])
    mixture = act(sum_i softmax(score)_i * v_i)             rows mixed as they are, not normalised

Everything is fp32 inside, res_norm * res_proj included; the one rounding is the last. Each token
has its own shares. S may be 0: the mixture is then the prefix.
Source: Kimi K3 modeling_kimi_linear.py, the attention-residual selection.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker

BANK = Arg("S T N", layout="rows")
PREFIX = Arg("T N", layout="rows")


def selection_inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    """bank, res_norm, res_proj with scores of a few units, so that no source takes everything."""
    sources, tokens, width = cell["S"], cell["T"], cell["N"]
    bank = make.normal(cell.get("rows", sources), tokens + cell.get("spare", 0), width)
    return {
        "bank": bank[:sources, :tokens],
        "res_norm": make.uniform(width, low=0.5, high=1.5),
        "res_proj": make.normal(width, scale=2 * width**-0.5),
    }


def selection_cost(sizes: Mapping[str, int], *, rows: int, vectors: int) -> Cost:
    """`rows` tensors [T, N] besides the bank, `vectors` weights [N]."""
    tokens, width = sizes["T"], sizes["N"]
    sources = sizes["S"] + 1
    moved = ((sizes["S"] + rows) * tokens + vectors) * width * sizes["act"]
    return Cost(bytes=moved, flops=(6 * sources + 4) * tokens * width)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    selection = selection_inputs(cell, make)
    return {**selection, "prefix": make.normal(cell["T"], cell["N"]), "eps": 1e-5}


def cost(sizes: Mapping[str, int]) -> Cost:
    return selection_cost(sizes, rows=2, vectors=2)


CONTRACT = Contract(
    axes={"S": "snapshots", "T": "tokens", "N": "hidden size"},
    args={
        "bank": BANK,
        "prefix": PREFIX,
        "res_norm": Arg("N"),
        "res_proj": Arg("N"),
        "eps": Value(float, "inside the root"),
    },
    returns={"mixture": Arg("T N")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano decode", ("tp1",), S=3, T=1, N=256),
        Cell("nano batch", ("tp1",), S=4, T=8, N=256),
        Cell("a slice of a larger bank, in both axes", ("tp1",), S=2, T=3, N=64, rows=5, spare=4),
        Cell("before the first snapshot", ("tp1",), S=0, T=2, N=64),
        Cell("K3, five of a larger bank", S=5, T=20, N=7168, rows=7, spare=2),
        Cell("K3 output selection", ("tp16_moetp4ep4",), S=8, T=1, N=7168),
    ),
    tolerance=Tolerance(
        element_ulps=1.5,
        rms_ulps=0.75,
        fp32_element_ulps=40,
        fp32_rms_ulps=40,
        why="one rounding of half an ulp, doubled where a row's largest element sits just above a "
        "power of two; fp32 scores are sums of up to 7168 terms, and their error moves the shares",
    ),
    hazards=(Hazard("early_read", "weights are read before the wait", ("res_norm", "res_proj")),),
)
