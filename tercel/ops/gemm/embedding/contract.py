"""This rank's rows of a table that the vocabulary divides; rows of other ranks are zero.

    y = table[tokens - first_id] where 0 <= tokens - first_id < V, else 0       no rounding

Summed over ranks, each token's row is its own plus zeros: exact in every dtype.
Source: Kimi K3 modeling_kimi_linear.py, embed_tokens; Megatron-LM, VocabParallelEmbedding.
"""

from collections.abc import Mapping
from typing import Any

from tercel.contract import Arg, Cell, Contract, Cost, Tolerance, Value
from tercel.contract.contract import InputMaker


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    return {
        "tokens": make.integers(cell["T"], low=0, high=cell["vocabulary"]),
        "table": make.normal(cell["V"], cell["N"]),
        "first_id": cell["first"],
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    return Cost(bytes=sizes["tokens_bytes"] + 2 * sizes["T"] * sizes["N"] * sizes["act"])


CONTRACT = Contract(
    axes={"T": "tokens", "V": "vocabulary of this rank", "N": "hidden size"},
    args={
        "tokens": Arg("T", "i64"),
        "table": Arg("V N"),
        "first_id": Value(int, "id of table[0]"),
    },
    returns={"y": Arg("T N")},
    cost=cost,
    inputs=inputs,
    where=("first_id >= 0",),
    cells=(
        Cell("nano, a quarter, one token", ("tp4",), T=1, V=320, N=256, vocabulary=320, first=0),
        Cell("nano, third quarter", ("tp4",), T=41, V=320, N=256, vocabulary=1280, first=640),
        Cell("no token is here", ("tp2",), T=3, V=48, N=64, vocabulary=48, first=48),
        Cell("K3 hidden row", ("tp16_moetp4ep4",), T=2, V=16, N=7168, vocabulary=32, first=16),
    ),
    tolerance=Tolerance(element_ulps=0, rms_ulps=0, why="copies of stored rows, and zeros"),
)
