"""Penalties and biases, applied in place to the few logits that have any.

For every listed (row, token), with the row's settings:

    l = l / repetition if l > 0 else l * repetition      where seen
    l = l - frequency * count - presence * (count > 0)

and then, for every listed bias, logits[row, token] += value. The bias comes last, so that a
repetition penalty does not rescale what the user added.
Source: Keskar et al. 2019, section 4.1 (repetition); OpenAI API (frequency, presence, logit_bias).
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance
from tercel.contract.contract import InputMaker
from tercel.errors import ContractError


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    rows, vocabulary, listed, biased = cell["S"], cell["V"], cell["C"], cell["B"]
    places = make.choice(listed, low=0, high=rows * vocabulary)
    biases = make.choice(biased, low=0, high=rows * vocabulary)
    counts = make.integers(listed, low=0, high=4, dtype="f32")
    prompted = make.integers(listed, low=0, high=2, dtype="f32")
    return {
        "logits": make.normal(rows, vocabulary, scale=3.0, dtype="f32"),
        "rows": places // vocabulary,
        "tokens": places % vocabulary,
        "counts": counts,
        "seen": torch.maximum(prompted, (counts > 0).to(prompted.dtype)),
        "repetition": make.uniform(rows, low=0.8, high=1.5, dtype="f32"),
        "presence": make.uniform(rows, low=-1.0, high=1.0, dtype="f32"),
        "frequency": make.uniform(rows, low=-1.0, high=1.0, dtype="f32"),
        "bias_rows": biases // vocabulary,
        "bias_tokens": biases % vocabulary,
        "bias_values": make.normal(biased, scale=5.0, dtype="f32"),
    }


def valid(*, logits: torch.Tensor, repetition: torch.Tensor, **lists: torch.Tensor) -> None:
    height, vocabulary = logits.shape
    if not bool((repetition > 0).all()):
        raise ContractError("repetition: must be above 0")
    for prefix in ("", "bias_"):
        rows, tokens = lists[f"{prefix}rows"], lists[f"{prefix}tokens"]
        outside = (rows < 0) | (rows >= height) | (tokens < 0) | (tokens >= vocabulary)
        if bool(outside.any()):
            raise ContractError(f"{prefix}rows, {prefix}tokens: outside [{height}, {vocabulary}]")
        if len(torch.unique(rows * vocabulary + tokens)) < len(rows):
            raise ContractError(f"{prefix}rows, {prefix}tokens: a place is listed twice")


def cost(sizes: Mapping[str, int]) -> Cost:
    listed, biased, rows = sizes["C"], sizes["B"], sizes["S"]
    return Cost(bytes=32 * listed + 28 * biased + 12 * rows, flops=6 * listed + biased)


CONTRACT = Contract(
    axes={"S": "rows", "V": "vocabulary", "C": "penalised places", "B": "biased places"},
    args={
        "logits": Arg("S V", "f32", written="the listed places"),
        "rows": Arg("C", "i64"),
        "tokens": Arg("C", "i64"),
        "counts": Arg("C", "f32"),
        "seen": Arg("C", "f32"),
        "repetition": Arg("S", "f32"),
        "presence": Arg("S", "f32"),
        "frequency": Arg("S", "f32"),
        "bias_rows": Arg("B", "i64"),
        "bias_tokens": Arg("B", "i64"),
        "bias_values": Arg("B", "f32"),
    },
    returns={},
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano, one long request", ("tp1",), S=1, V=1280, C=200, B=3),
        Cell("nano batch", ("tp1",), S=8, V=1280, C=300, B=20),
        Cell("biases alone", ("tp1",), S=3, V=96, C=0, B=5),
        Cell("penalties alone", ("tp1",), S=3, V=96, C=40, B=0),
    ),
    tolerance=Tolerance(
        element_ulps=4,
        rms_ulps=1,
        why="fp32: a division, two products, two differences and a sum, on few places of a row",
    ),
)
