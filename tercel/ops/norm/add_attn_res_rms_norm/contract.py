"""A sublayer's output joins the prefix sum; then the selection and norm of the next sublayer.

    updated = act(prefix + x), or x where a snapshot has just emptied the prefix
    mixture = attn_res(bank, updated; res_norm, res_proj, res_eps)    one rounding to act
    r       = act(mixture * rsqrt(mean(mixture**2) + eps))
    normed  = act(r * weight)

Both later steps read rounded values, as the published model does.
Source: Kimi K3 modeling_kimi_linear.py, the decoder layer with attention residuals.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops.norm.attn_res.contract import BANK, PREFIX, selection_cost, selection_inputs


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, width = cell["T"], cell["N"]
    return {
        **selection_inputs(cell, make),
        "x": make.normal(tokens, width),
        "prefix": make.normal(tokens, width) if cell["prefix"] else None,
        "weight": make.uniform(width, low=0.5, high=1.5),
        "res_eps": 1e-5,
        "eps": 1e-5,
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    return selection_cost(sizes, rows=5 if "prefix_bytes" in sizes else 4, vectors=3)


NEXT = Tolerance(
    element_ulps=5,
    rms_ulps=1.5,
    fp32_element_ulps=40,
    fp32_rms_ulps=40,
    why="four roundings, each up to an ulp just above a power of two: updated, mixture, normalised "
    "row, product; fp32 scores as in attn_res",
)
CONTRACT = Contract(
    axes={"S": "snapshots", "T": "tokens", "N": "hidden size"},
    args={
        "x": Arg("T N", layout="rows"),
        "prefix": Arg("T N", layout="rows", optional=True),
        "bank": BANK,
        "res_norm": Arg("N"),
        "res_proj": Arg("N"),
        "weight": Arg("N"),
        "res_eps": Value(float, "of the selection"),
        "eps": Value(float, "of the norm"),
    },
    returns={"normed": PREFIX, "updated": PREFIX, "mixture": PREFIX},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano decode", ("tp1",), S=3, T=1, N=256, prefix=True),
        Cell("nano batch", ("tp1",), S=4, T=8, N=256, prefix=True),
        Cell("after a snapshot", ("tp1",), S=2, T=8, N=256, prefix=False),
        Cell("a slice of a bank", ("tp1",), S=2, T=3, N=64, rows=5, spare=4, prefix=True),
        Cell("K3, five of a larger bank", S=5, T=20, N=7168, rows=7, spare=2, prefix=False),
        Cell("K3 last layer", ("tp16_moetp4ep4",), S=8, T=1, N=7168, prefix=True),
    ),
    tolerance={
        "updated": Tolerance(element_ulps=1, rms_ulps=0.6, why="one rounding of half an ulp"),
        "normed": NEXT,
        "mixture": NEXT,
    },
    hazards=(
        Hazard(
            "early_read", "weights are read before the wait", ("res_norm", "res_proj", "weight")
        ),
    ),
)
