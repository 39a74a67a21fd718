"""Embedding rows and their RMSNorm: the start of the model.

    embedding = table[tokens]                               no rounding
    r         = act(embedding * rsqrt(mean(embedding**2) + eps))
    normed    = act(r * weight)

With attention residuals the embedding is also snapshot 0 of the bank.
Source: Kimi K3 modeling_kimi_linear.py, embed_tokens, KimiRMSNorm.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.errors import ContractError


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, vocabulary, width = cell["T"], cell["V"], cell["N"]
    return {
        "tokens": make.integers(tokens, low=0, high=vocabulary),
        "table": make.normal(vocabulary, width),
        "weight": make.uniform(width, low=0.5, high=1.5),
        "snapshot": make.poison(tokens, width) if cell["bank"] else None,
        "eps": 1e-5,
    }


def valid(*, tokens: torch.Tensor, table: torch.Tensor, **_: Any) -> None:
    outside = (tokens < 0) | (tokens >= table.shape[0])
    if bool(outside.any()):
        wrong = tokens[outside][0].item()
        raise ContractError(f"tokens: {wrong} is outside the table's 0..{table.shape[0] - 1}")


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, width = sizes["T"], sizes["N"]
    copies = 4 if "snapshot_bytes" in sizes else 3
    moved = (copies * tokens * width + width) * sizes["act"]
    return Cost(bytes=moved + sizes["tokens_bytes"], flops=4 * tokens * width)


CONTRACT = Contract(
    axes={"T": "tokens", "V": "vocabulary, whole on every rank", "N": "hidden size"},
    args={
        "tokens": Arg("T", "i64"),
        "table": Arg("V N"),
        "weight": Arg("N"),
        "snapshot": Arg("T N", written="every row", optional=True),
        "eps": Value(float, "inside the root"),
    },
    returns={"normed": Arg("T N"), "embedding": Arg("T N")},
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano decode", ("tp1",), T=1, V=1280, N=256, bank=True),
        Cell("nano batch", ("tp1",), T=8, V=1280, N=256, bank=True),
        Cell("plain residual, no bank", ("tp1",), T=5, V=96, N=64, bank=False),
        Cell("K3 hidden row", ("tp16_moetp4ep4",), T=2, V=16, N=7168, bank=True),
    ),
    tolerance=Tolerance(
        element_ulps=2.5,
        rms_ulps=1,
        fp32_element_ulps=2,
        fp32_rms_ulps=2,
        why="normed as rms_norm: two roundings and an fp32 sum; the copies are exact",
    ),
    hazards=(Hazard("early_read", "the weight is read before the wait", ("weight",)),),
)
