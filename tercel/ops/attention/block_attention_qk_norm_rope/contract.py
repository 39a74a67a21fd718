"""A drafter layer's core on its packed projection: qk_norm_rope, then block_attention.

    q, k = qk_norm_rope(qkv, q_norm, k_norm, inv_freq, positions)     rounded to act in between
    out  = block_attention(q, k, v, ...)
    positions = context_lens[r] + i for slot i of request r

Equal to the two ops one after the other. qkv and the caches are only read.

Source: Qwen3 for the layer, DeepSpec and speculators for what a slot sees; the ops of both parts.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.core.rope import Rope
from tercel.ops._lib.block_attention import check_context, draw_context


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    width, heads, kv_heads, dim = (cell[axis] for axis in ("width", "H", "KV", "D"))
    frequencies = torch.tensor(Rope(dim, 1e4).inverse_frequencies, dtype=torch.float32)
    qkv = make.normal(len(cell["contexts"]) * width, (heads + 2 * kv_heads) * dim)
    return {
        "qkv": qkv,
        "q_norm": make.uniform(dim, low=0.5, high=1.5),
        "k_norm": make.uniform(dim, low=0.5, high=1.5),
        "inv_freq": frequencies.to(qkv.device),
        **draw_context(cell, make),
        "heads": heads,
        "kv_heads": kv_heads,
        "width": width,
        "eps": 1e-5,
        "rope_scale": cell.get("rope_scale", 1.0),
        "interleaved": cell.get("interleaved", False),
        "scale": dim**-0.5,
        "window": cell.get("window"),
        "window_from_anchor": cell.get("anchored", False),
        "causal": cell.get("causal", False),
    }


def valid(
    *, k_cache: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor, **_: Any
) -> None:
    check_context(k_cache, block_table, context_lens)


def cost(sizes: Mapping[str, int]) -> Cost:
    """Requests at the capacity of the block table; a shorter context or a window costs less."""
    requests, width, heads, kv_heads, dim = (
        sizes[axis] for axis in ("R", "width", "heads", "kv_heads", "D")
    )
    tokens, room = requests * width, sizes["PG"] * sizes["PS"]
    values = tokens * (2 * heads + 2 * kv_heads) * dim + 2 * requests * room * kv_heads * dim
    return Cost(
        bytes=(values + 2 * dim) * sizes["act"] + 2 * dim + 8 * requests * (sizes["PG"] + 1),
        flops=4 * tokens * heads * (room + width) * dim,
    )


NANO: dict[str, Any] = {"width": 7, "H": 4, "KV": 2, "D": 64, "PS": 16, "PAGES": 12}
K3: dict[str, Any] = {"H": 6, "KV": 1, "D": 64, "PS": 64, "PAGES": 12}

SPLITS = (
    *((requests, 1) for requests in (1, 2, 3, 4, 5, 8)),
    *((2, 4), (4, 2)),
    *((requests, width) for width in (7, 8) for requests in range(1, 9)),
)
"""(requests, slots of each) that K3's drafters run at."""
CONTEXTS = (2041, 0, 1, 63, 64, 65, 700, 1290)


def split(requests: int, width: int) -> Cell:
    """Contexts that end on both sides of a page, are empty, and are divided."""
    sizes = {**K3, "PAGES": 72, "width": width, "contexts": CONTEXTS[:requests]}
    return Cell("a split of a rank of 16", ("tp16_moetp4ep4",), **sizes)


QUARTER: dict[str, Any] = {**K3, "H": 24, "KV": 4, "width": 7}

CONTRACT = Contract(
    axes={
        "R": "requests, width slots each",
        "D": "channels of a head",
        "PG": "pages of the longest request",
        "PS": "tokens of a page",
        "PAGES": "pages of the pool",
    },
    args={
        "qkv": Arg("R*width (heads+2*kv_heads)*D", layout="rows"),
        "q_norm": Arg("D"),
        "k_norm": Arg("D"),
        "inv_freq": Arg("D//2", "f32"),
        "k_cache": Arg("PAGES PS kv_heads D", layout="rows"),
        "v_cache": Arg("PAGES PS kv_heads D", layout="rows"),
        "block_table": Arg("R PG", "i64"),
        "context_lens": Arg("R", "i64"),
        "heads": Value(int, "query heads of this rank"),
        "kv_heads": Value(int, "key and value heads of this rank"),
        "width": Value(int, "slots of a block"),
        "eps": Value(float, "of the norms of heads"),
        "rope_scale": Value(float, "of cos and sin; 1 without YaRN"),
        "interleaved": Value(bool, "whether neighbouring channels turn together"),
        "scale": Value(float, "of the scores"),
        "window": Value((int, type(None)), "tokens that a slot sees; None: all"),
        "window_from_anchor": Value(bool, "whether every slot's window ends at the anchor"),
        "causal": Value(bool, "whether a slot sees no later slot"),
    },
    returns={"out": Arg("R*width heads*D")},
    where=(
        "D % 2 == 0",
        "heads % kv_heads == 0",
        "width >= 1",
        "window is None or window >= 1",
    ),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell(
            "nano: none, inside a page, at its ends", ("tp1",), **NANO, contexts=(0, 7, 15, 16, 47)
        ),
        Cell("rank of 16, one request", ("tp16_moetp4ep4",), **K3, width=7, contexts=(187,)),
        Cell("rank of 16, many", ("tp16_moetp4ep4",), **K3, width=8, contexts=(1, 63, 64, 65, 130)),
        Cell(
            "speculators' windows, neighbouring pairs and a YaRN scale",
            **{**NANO, "D": 16, "PS": 4, "PAGES": 24},
            contexts=(0, 5, 30),
            window=7,
            anchored=True,
            causal=True,
            interleaved=True,
            rope_scale=1.2,
        ),
        Cell("K3 drafter's heads, rank of 4", ("tp4",), **QUARTER, contexts=(65, 187)),
        *(split(requests, width) for requests, width in SPLITS),
    ),
    tolerance=Tolerance(
        element_ulps=24,
        rms_ulps=4,
        fp32_element_ulps=64,
        fp32_rms_ulps=24,
        why="queries and keys are rounded to act before scores of size 5, of which an ulp is "
        "relative error of the shares; then one rounding of a mean of values",
    ),
    hazards=(
        Hazard("capacity", "a context past the block table is cut; only `valid` raises"),
        Hazard("stale_state", "a context row that nobody wrote is read as it is; nothing raises"),
        Hazard(
            "early_read",
            "lengths, tables and norms are read before the wait; see block_attention",
            ("q_norm", "k_norm", "inv_freq", "block_table", "context_lens"),
        ),
        Hazard("silent_input", "pairs other than those trained on draft badly; nothing raises"),
    ),
)
