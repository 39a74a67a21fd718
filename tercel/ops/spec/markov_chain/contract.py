"""Draft tokens, left to right, from a block's logits and a bias by the token before.

    logits[r, j] = base[r * G + j] + w2 @ w1[previous]      fp32 sums, not rounded
    token[r, j]  = argmax(logits / temperature + gumbel)    or argmax(logits) at temperature 0
    previous     = token[r, j];  at first the anchor

so that token j is drawn from softmax(logits[r, j] / temperature), which is the q of op accept. The
noise of an id is a function of (seed, anchor's position, DRAFT + j, id): it does not depend on the
ranks, and no rank draws another's. Ties go to the lower id. Without w1 and w2 there is no bias:
DFlash.

The vocabulary is divided over the ranks of `group`, in order: each holds its part of the logits and
of w2, and all of w1. Per slot the ranks exchange one pair (value, id) per request, G times, since a
slot needs the token before; that is all that is exchanged, and every rank gets the same tokens.

Source: DSpark, arXiv 2607.05147, the vanilla Markov head; DeepSpec chains through the drawn token.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.core.group import SingleGroup
from tercel.errors import ContractError

POSTS = 264
"""Words of a board per request and draft: two for each program of a launch."""


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    requests, slots, vocabulary, rank = cell["R"], cell["G"], cell["V"], cell["D"]
    temperature = make.uniform(requests, low=0.5, high=1.5, dtype="f32")
    temperature[1::3] = 0.0
    if cell["greedy"]:
        temperature.zero_()
    return {
        "base": make.normal(requests * slots, vocabulary, scale=2.0, dtype="f32"),
        "anchors": make.integers(requests, low=0, high=vocabulary),
        "w1": make.normal(vocabulary, rank) if rank else None,
        "w2": make.normal(vocabulary, rank, scale=2 * rank**-0.5) if rank else None,
        "temperature": temperature,
        "seeds": make.integers(requests, low=-(1 << 62), high=1 << 62),
        "positions": make.integers(requests, low=0, high=1 << 20),
        "group": SingleGroup(),
        "num_drafts": slots,
        "greedy": cell["greedy"],
        "board": make.integers(slots * requests * POSTS, low=0, high=1, dtype="i64"),
    }


def valid(
    *,
    base: torch.Tensor,
    anchors: torch.Tensor,
    temperature: torch.Tensor,
    positions: torch.Tensor,
    group: Any,
    greedy: bool,
    **_: Any,
) -> None:
    vocabulary = base.shape[1] * group.world_size
    if bool(((anchors < 0) | (anchors >= vocabulary)).any()):
        raise ContractError(f"anchors: {anchors.tolist()} leave the vocabulary of {vocabulary}")
    if bool((temperature < 0).any()) or (greedy and bool((temperature > 0).any())):
        raise ContractError(f"temperature: {temperature.tolist()} with greedy={greedy}")
    if bool((positions < 0).any()):
        raise ContractError(f"positions: {positions.tolist()} must be 0 or more")


def cost(sizes: Mapping[str, int]) -> Cost:
    rows, vocabulary, rank = sizes["R"] * sizes["num_drafts"], sizes["V"], sizes.get("D", 0)
    weights = sizes["num_drafts"] * vocabulary * rank + rows * rank
    return Cost(
        bytes=8 * rows * vocabulary + weights * sizes["act"] + 8 * rows,
        flops=2 * rows * vocabulary * (rank + 1),
    )


CONTRACT = Contract(
    axes={
        "R": "requests",
        "BOARD": "words in which programs of a launch meet",
        "V": "vocabulary of this rank",
        "VOCABULARY": "all of it",
        "D": "rank of the Markov head",
    },
    args={
        "base": Arg("R*num_drafts V", "f32"),
        "anchors": Arg("R", "i64", layout="any"),
        "w1": Arg("VOCABULARY D", optional=True),
        "w2": Arg("V D", optional=True),
        "temperature": Arg("R", "f32"),
        "seeds": Arg("R", "i64"),
        "positions": Arg("R", "i64"),
        "group": Value(
            object, "the ranks that hold the vocabulary; every exchange goes through it"
        ),
        "num_drafts": Value(int, "G, drafts of each request"),
        "greedy": Value(bool, "whether every temperature is 0"),
        "board": Arg("BOARD", "i64", optional=True),
    },
    returns={"tokens": Arg("R num_drafts", "i64"), "logits": Arg("R*num_drafts V", "f32")},
    where=("num_drafts >= 1", "VOCABULARY == V * group.world_size"),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano, one request, greedy", ("tp1",), R=1, G=7, V=1280, D=64, greedy=True),
        Cell("nano, greedy and drawn", ("tp1",), R=3, G=3, V=1280, D=64, greedy=False),
        Cell("no Markov head: DFlash", ("tp1",), R=3, G=4, V=96, D=0, greedy=False),
        Cell("K3 rank of 16", ("tp16_moetp4ep4",), R=1, G=7, V=10240, D=256, greedy=True),
    ),
    tolerance={
        "tokens": Tolerance(
            element_ulps=0,
            rms_ulps=0,
            why="exact: a tie within the rounding of the logits does not occur in the cells",
        ),
        "logits": Tolerance(
            element_ulps=1,
            rms_ulps=1,
            fp32_element_ulps=24,
            fp32_rms_ulps=8,
            why="one rounding, and an fp32 sum over the rank, of which tensor cores cut off what "
            "does not fit beside a step's largest term: 6.0 rms and 13.8 seen at a rank of 256",
        ),
    },
    hazards=(
        Hazard("silent_input", "greedy=True ignores the temperatures", ("temperature",)),
        Hazard("capacity", "an anchor outside w1 reads what is there; only `valid` raises"),
        Hazard("aliasing", "two calls at once on the same board stop the device", ("board",)),
        Hazard("launch_order", "ranks that call in different orders exchange the wrong rows"),
    ),
)
