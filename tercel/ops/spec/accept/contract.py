"""Which drafts of a verify step are kept, and the token after them.

Row j of a request's G + 1 rows of logits is the target's after j drafts. With n its anchor's
position, temperature, top-k, top-p and min-p of the request give p as op sample does; at
temperature 0 all of p is on the largest logit. q is softmax(draft_logits / temperature), or all on
the draft at temperature 0 and where there are no draft_logits. See rules.py for

    match   rows are drawn as plain decoding would, from uniform(seed, n + 1 + j, TARGET)
    token   draft j is kept while uniform(seed, n, ACCEPT + j) < p / q
    block   the longest block whose number is below its threshold; keeps more than token
            the token after them, for both: from the residual by uniform(seed, n, RESIDUAL)

    tokens   = the kept drafts, then the token after them to the end of the row
    finite   = all rows up to that token's are; where not, the token is 0

Only num_drafts of the G drafts are considered, so that requests of one step may differ.

The vocabulary may be divided over the ranks of `group`, in order. Where every temperature is 0 the
ranks exchange (largest logit, its id) per row; else they gather the logits, as a filter and a
residual need the whole distribution. Results are equal on every rank: all decide from the same
numbers. Source: DSpark, arXiv 2607.05147; rules.py names the sources of the rules.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.core.group import SingleGroup
from tercel.errors import ContractError
from tercel.ops._lib.distribution import check_parameters

MEETINGS = 4
"""Counters per request: what any number of its programs needs."""


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    """Drafts are drawn from the target's logits with an error; `certain` ones lack their own."""
    requests, slots, vocabulary = cell["R"], cell["G"], cell["V"]
    kind, ragged = cell["kind"], cell.get("ragged", False)
    logits = make.normal(requests, slots + 1, vocabulary, scale=3.0, dtype="f32")
    noise = make.uniform(requests, slots, vocabulary, low=1e-6, high=1.0, dtype="f32")
    error = make.normal(requests, slots, vocabulary, scale=0.1 if kind == "greedy" else 0.7)
    proposals = logits[:, :-1] + error.float()
    temperature = make.uniform(requests, low=0.5, high=1.5, dtype="f32")
    temperature[1::3] = 0.0
    if kind == "greedy":
        temperature.zero_()
    heat = temperature.clamp_min(1e-3)[:, None, None]
    filtered = kind == "filtered"
    return {
        "logits": logits.flatten(0, 1),
        "drafts": (proposals / heat - (-noise.log()).log()).argmax(-1),
        "draft_logits": proposals.flatten(0, 1) if kind in ("drawn", "filtered") else None,
        "num_drafts": make.integers(requests, low=0 if ragged else slots, high=slots + 1),
        "temperature": temperature,
        "top_k": make.integers(requests, low=0, high=20 if filtered else 1),
        "top_p": make.uniform(requests, low=0.5 if filtered else 1.0, high=1.0, dtype="f32"),
        "min_p": make.uniform(requests, low=0.0, high=0.1 if filtered else 0.0, dtype="f32"),
        "seeds": make.integers(requests, low=-(1 << 62), high=1 << 62),
        "positions": make.integers(requests, low=0, high=1 << 20),
        "group": SingleGroup(),
        "rule": cell["rule"],
        "filtered": filtered,
        "greedy": kind == "greedy",
        "counters": make.integers(MEETINGS * requests, low=0, high=1, dtype="i32"),
    }


def valid(
    *, logits: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor, **rest: Any
) -> None:
    check_parameters(**rest)
    vocabulary = logits.shape[1] * rest["group"].world_size
    if bool(((drafts < 0) | (drafts >= vocabulary)).any()):
        raise ContractError(f"drafts: {drafts.tolist()} leave the vocabulary of {vocabulary}")
    if bool(((num_drafts < 0) | (num_drafts > drafts.shape[1])).any()):
        raise ContractError(f"num_drafts: {num_drafts.tolist()} must be 0 .. {drafts.shape[1]}")


def cost(sizes: Mapping[str, int]) -> Cost:
    rows, vocabulary = sizes["R"] * (sizes["G"] + 1), sizes["V"]
    moved = sizes["logits_bytes"] + sizes.get("draft_logits_bytes", 0)
    return Cost(bytes=moved + 16 * rows + 48 * sizes["R"], flops=8 * rows * vocabulary)


CONTRACT = Contract(
    axes={
        "R": "requests",
        "G": "drafts of each",
        "V": "vocabulary of this rank",
        "COUNTERS": "where programs of a launch meet",
    },
    args={
        "logits": Arg("R*(G+1) V", "f32"),
        "drafts": Arg("R G", "i64", layout="rows"),
        "draft_logits": Arg("R*G V", "f32", optional=True),
        "num_drafts": Arg("R", "i64"),
        "temperature": Arg("R", "f32"),
        "top_k": Arg("R", "i64"),
        "top_p": Arg("R", "f32"),
        "min_p": Arg("R", "f32"),
        "seeds": Arg("R", "i64"),
        "positions": Arg("R", "i64"),
        "group": Value(
            object, "the ranks that hold the vocabulary; every exchange goes through it"
        ),
        "rule": Value(str, "match, token or block"),
        "filtered": Value(bool, "whether any request filters"),
        "greedy": Value(bool, "whether every temperature is 0"),
        "counters": Arg("COUNTERS", "i32", optional=True),
    },
    returns={
        "tokens": Arg("R G+1", "i64"),
        "accepted": Arg("R", "i64"),
        "finite": Arg("R", "bool"),
    },
    where=("G >= 1", "rule == 'match' or rule == 'token' or rule == 'block'"),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano, greedy", ("tp1",), R=5, G=7, V=1280, kind="greedy", rule="match", ragged=True),
        Cell("nano, its own draws", ("tp1",), R=8, G=7, V=1280, kind="filtered", rule="match"),
        Cell("nano, token", ("tp1",), R=8, G=7, V=1280, kind="drawn", rule="token", ragged=True),
        Cell("nano, block", ("tp1",), R=8, G=7, V=1280, kind="filtered", rule="block", ragged=True),
        Cell("a suffix drafter's", ("tp1",), R=9, G=3, V=96, kind="certain", rule="block"),
        Cell("K3 rank of 16", ("tp16_moetp4ep4",), R=1, G=7, V=10240, kind="greedy", rule="block"),
    ),
    tolerance=Tolerance(
        element_ulps=0,
        rms_ulps=0,
        why="tokens and counts are exact: both sides compute in fp64, and a number within 1e-13 of "
        "a threshold does not occur in the cells",
    ),
    hazards=(
        Hazard(
            "silent_input", "drafts not drawn from q bias what token and block keep", ("drafts",)
        ),
        Hazard("silent_input", "filtered=False ignores top_k, top_p and min_p", ("top_k",)),
        Hazard("silent_input", "greedy=True ignores the temperatures", ("temperature",)),
        Hazard("aliasing", "two calls at once on the same counters stop the device", ("counters",)),
        Hazard("launch_order", "ranks that call in different orders exchange the wrong rows"),
    ),
)
