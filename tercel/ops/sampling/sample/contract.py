"""One token per row: the largest logit, or a draw from the filtered distribution.

    temperature 0:  token = argmax(logits), ties to the lower id
    otherwise, in fp64:
        p      = softmax(logits / temperature)
        top-k  keeps the k largest and what equals the smallest of them; k = 0: all
        top-p  keeps, of what is left, the fewest largest whose share reaches top_p, and what
               equals the smallest of them; 1: all
        min-p  keeps p >= min_p * the largest p; 0: all
        token  = the first id, in id order, whose cumulative kept mass exceeds u * kept mass
    u      = uniform(seed, position, stream) in [0, 1), see tercel.ops._lib.philox
    finite = no NaN, no +inf and something above -inf in the row; where not, token = 0

A row's token depends on that row alone. Source: the sampling order of transformers and vLLM
(temperature, top-k, top-p, min-p), with ties kept so that it does not depend on a sort.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.distribution import check_parameters


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    rows, vocabulary, kind = cell["S"], cell["V"], cell["kind"]
    logits = make.normal(rows, vocabulary, scale=3.0, dtype="f32")
    temperature = make.uniform(rows, low=0.2, high=1.5, dtype="f32")
    temperature[::3] = 0.0
    if kind == "greedy":
        temperature.zero_()
    filtered = kind == "filtered"
    return {
        "logits": logits,
        "temperature": temperature,
        "top_k": make.integers(rows, low=0, high=20 if filtered else 1),
        "top_p": make.uniform(rows, low=0.3 if filtered else 1.0, high=1.0, dtype="f32"),
        "min_p": make.uniform(rows, low=0.0, high=0.2 if filtered else 0.0, dtype="f32"),
        "seeds": make.integers(rows, low=-(1 << 62), high=1 << 62),
        "positions": make.integers(rows, low=0, high=1 << 20),
        "stream": cell.get("stream", 0),
        "filtered": filtered,
        "greedy": kind == "greedy",
        "counters": make.integers(3 * rows, low=0, high=1, dtype="i32"),
    }


def valid(**arguments: Any) -> None:
    check_parameters(**arguments)


def cost(sizes: Mapping[str, int]) -> Cost:
    rows, vocabulary = sizes["S"], sizes["V"]
    return Cost(bytes=4 * rows * vocabulary + 45 * rows, flops=4 * rows * vocabulary)


CONTRACT = Contract(
    axes={
        "S": "rows",
        "V": "vocabulary, whole",
        "COUNTERS": "where programs of a launch meet",
    },
    args={
        "logits": Arg("S V", "f32"),
        "temperature": Arg("S", "f32"),
        "top_k": Arg("S", "i64"),
        "top_p": Arg("S", "f32"),
        "min_p": Arg("S", "f32"),
        "seeds": Arg("S", "i64"),
        "positions": Arg("S", "i64"),
        "stream": Value(int, "separates the draws of one position"),
        "filtered": Value(bool, "whether any row filters"),
        "greedy": Value(bool, "whether every temperature is 0"),
        "counters": Arg("COUNTERS", "i32", optional=True),
    },
    returns={"tokens": Arg("S", "i64"), "finite": Arg("S", "bool")},
    cost=cost,
    inputs=inputs,
    valid=valid,
    where=("0 <= stream < 1 << 32",),
    cells=(
        Cell("nano, greedy", ("tp1",), S=1, V=1280, kind="greedy"),
        Cell("nano, a batch of greedy and drawn rows", ("tp1",), S=8, V=1280, kind="plain"),
        Cell("nano, a batch with filters", ("tp1",), S=8, V=1280, kind="filtered", stream=2),
        Cell("nothing to sample", ("tp1",), S=0, V=96, kind="plain"),
        Cell("K3's vocabulary", ("tp16_moetp4ep4",), S=2, V=163840, kind="filtered"),
    ),
    tolerance=Tolerance(
        element_ulps=0,
        rms_ulps=0,
        why="tokens are exact: both sides compute in fp64 and a draw within 1e-13 of a boundary "
        "does not occur in the cells",
    ),
    hazards=(
        Hazard("silent_input", "filtered=False ignores top_k, top_p and min_p", ("top_k",)),
        Hazard("silent_input", "greedy=True ignores the temperatures", ("temperature",)),
    ),
)
