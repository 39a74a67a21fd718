"""Log probabilities of the tokens drawn and of the likeliest ones, from unscaled logits.

    logprob     = log_softmax(logits)                             fp32
    chosen      = logprob[token]
    top_*       = the `top` largest, best first, ties to the lower id
    rank        = 1 + the number of logits strictly above the token's

Source: OpenAI API (logprobs, top_logprobs); vLLM for the rank.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.errors import ContractError

BARRED = -100.0
"""As good as -inf, between which and itself there is no distance that a tolerance speaks of."""
KINDS = ("equal", "rounded", "barred", "together", "many", "one")
"""Rows whose likeliest tokens are equal, or side by side, or one that is far from all others."""
MANY = 600
"""Neighbours above all others."""


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    rows, vocabulary, kind = cell["S"], cell["V"], cell.get("kind", "normal")
    logits = make.normal(rows, vocabulary, scale=3.0, dtype="f32")
    if kind == "equal":
        logits.zero_()
        logits[:, ::3] = -0.0
    elif kind == "rounded":
        logits = logits.round()
    elif kind == "barred":
        logits[:, : vocabulary // 2] = BARRED
        logits[:, vocabulary // 2 + 3 :] = BARRED
    elif kind == "together":
        logits[:, vocabulary // 3 :][:, : cell["top"]] += 50.0
    elif kind == "many":
        logits[:, vocabulary // 3 :][:, :MANY] += 50.0
    elif kind == "one":
        logits[:, -1] = 1e30
    return {
        "logits": logits,
        "tokens": make.integers(rows, low=0, high=vocabulary),
        "top": cell["top"],
    }


def valid(*, logits: torch.Tensor, tokens: torch.Tensor, **_: Any) -> None:
    if bool(((tokens < 0) | (tokens >= logits.shape[1])).any()):
        raise ContractError(f"tokens: outside the vocabulary 0..{logits.shape[1] - 1}")


def cost(sizes: Mapping[str, int]) -> Cost:
    rows, vocabulary = sizes["S"], sizes["V"]
    moved = 4 * rows * vocabulary + rows * (20 + 12 * sizes["top"])
    return Cost(bytes=moved, flops=4 * rows * vocabulary)


CONTRACT = Contract(
    axes={"S": "rows", "V": "vocabulary, whole"},
    args={
        "logits": Arg("S V", "f32"),
        "tokens": Arg("S", "i64"),
        "top": Value(int, "likeliest tokens wanted"),
    },
    returns={
        "chosen": Arg("S", "f32"),
        "top_values": Arg("S top", "f32"),
        "top_ids": Arg("S top", "i64"),
        "rank": Arg("S", "i64"),
    },
    cost=cost,
    inputs=inputs,
    where=("0 <= top <= V",),
    valid=valid,
    cells=(
        Cell("nano, one row", ("tp1",), S=1, V=1280, top=5),
        Cell("nano batch", ("tp1",), S=8, V=1280, top=20),
        Cell("no alternatives", ("tp1",), S=3, V=96, top=0),
        Cell("K3's vocabulary", ("tp16_moetp4ep4",), S=1, V=163840, top=20),
        *(
            Cell(f"K3's vocabulary, {kind}", ("tp16_moetp4ep4",), S=2, V=163840, top=20, kind=kind)
            for kind in KINDS
        ),
        Cell("many likeliest tokens", ("tp16_moetp4ep4",), S=2, V=163840, top=64),
    ),
    tolerance=Tolerance(
        element_ulps=2,
        rms_ulps=2,
        fp32_element_ulps=128,
        fp32_rms_ulps=128,
        why="a difference and a logarithm in fp32, of an fp32 sum over the vocabulary: torch adds "
        "163,840 terms of one sign in a few chains, which costs up to 53 ulps of the sum; ids and "
        "ranks are exact",
    ),
)
