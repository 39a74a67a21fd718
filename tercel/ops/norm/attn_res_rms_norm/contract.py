"""The selection over the attention residuals, then the RMSNorm of the sublayer that reads it.

    mixture = attn_res(bank, prefix; res_norm, res_proj, res_eps)     one rounding to act
    r       = act(mixture * rsqrt(mean(mixture**2) + eps))
    normed  = act(r * weight)

The norm reads the rounded mixture, as the published model does.
Source: Kimi K3 modeling_kimi_linear.py, the attention-residual selection and KimiRMSNorm.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops.norm.attn_res.contract import BANK, PREFIX, selection_cost, selection_inputs


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {
        **selection_inputs(cell, make),
        "prefix": make.normal(cell["T"], cell["N"]),
        "weight": make.uniform(cell["N"], low=0.5, high=1.5),
        "res_eps": 1e-5,
        "eps": 1e-5,
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    return selection_cost(sizes, rows=3, vectors=3)


CONTRACT = Contract(
    axes={"S": "snapshots", "T": "tokens", "N": "hidden size"},
    args={
        "bank": BANK,
        "prefix": PREFIX,
        "res_norm": Arg("N"),
        "res_proj": Arg("N"),
        "weight": Arg("N"),
        "res_eps": Value(float, "of the selection"),
        "eps": Value(float, "of the norm"),
    },
    returns={"normed": Arg("T N"), "mixture": Arg("T N")},
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano decode", ("tp1",), S=3, T=1, N=256),
        Cell("nano batch", ("tp1",), S=4, T=8, N=256),
        Cell("a slice of a larger bank, in both axes", ("tp1",), S=2, T=3, N=64, rows=5, spare=4),
        Cell("K3, five of a larger bank", S=5, T=20, N=7168, rows=7, spare=2),
        Cell("K3 output selection", ("tp16_moetp4ep4",), S=8, T=1, N=7168),
    ),
    tolerance=Tolerance(
        element_ulps=4,
        rms_ulps=1.25,
        fp32_element_ulps=40,
        fp32_rms_ulps=40,
        why="three roundings, each up to an ulp just above a power of two: mixture, normalised "
        "row, product; fp32 scores as in attn_res",
    ),
    hazards=(
        Hazard(
            "early_read", "weights are read before the wait", ("res_norm", "res_proj", "weight")
        ),
    ),
)
