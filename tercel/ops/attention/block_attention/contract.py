"""Attention of draft blocks: each slot sees its request's cached context and its own block.

    slot i of request r, with n = context_lens[r] cached tokens, has position n + i and sees
      context j < n     where j >= n - window            window_from_anchor
                        where n + i - j < window         otherwise
      slot m            where m <= i                     causal
                        where |i - m| < window           not window_from_anchor
    out[i, h] = act(sum softmax(scale * q . k) v)        fp32, over all of these

No window sees all of the context; not causal, a slot sees later slots too. The block's keys and
values are not stored. Token j of request r lies in page block_table[r, j // PS]; page 0 is the
sink. Whatever lies past a request's context, NaN included, has no effect. Padding requests have
no context and see their own block only.

Query heads share a KV head in runs of H / KV. Without v and v_cache the values are the first v_dim
channels of the keys: MLA with absorbed queries, where KV is 1.

Source: DeepSpec and z-lab/dflash (transformers' windows), speculators (windows from the anchor).
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.block_attention import check_context, draw_context


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    width, heads, kv_heads, dim = (cell[axis] for axis in ("width", "H", "KV", "D"))
    tokens, v_dim = len(cell["contexts"]) * width, cell.get("V", dim)
    latent = "V" in cell.sizes
    return {
        "q": make.normal(tokens, heads, dim),
        "k": make.normal(tokens, kv_heads, dim),
        "v": None if latent else make.normal(tokens, kv_heads, dim),
        **draw_context(cell, make),
        "width": width,
        "v_dim": v_dim,
        "scale": dim**-0.5,
        "window": cell.get("window"),
        "window_from_anchor": cell.get("anchored", False),
        "causal": cell.get("causal", False),
    }


def valid(
    *,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    **_: Any,
) -> None:
    check_context(k_cache, block_table, context_lens)


def cost(sizes: Mapping[str, int]) -> Cost:
    """Requests at the capacity of the block table; a shorter context or a window costs less."""
    requests, width, heads, kv_heads, dim = (sizes[x] for x in ("R", "width", "H", "KV", "D"))
    values = 0 if "v_cache_bytes" not in sizes else sizes["v_dim"]
    tokens, room = requests * width, sizes["PG"] * sizes["PS"]
    rows = (requests * room + tokens) * kv_heads * (dim + values)
    moved = (rows + tokens * heads * (dim + sizes["v_dim"])) * sizes["act"]
    return Cost(
        bytes=moved + 8 * requests * (sizes["PG"] + 1),
        flops=2 * tokens * heads * (room + width) * (dim + sizes["v_dim"]),
    )


NANO: dict[str, Any] = {"width": 7, "H": 4, "KV": 2, "D": 64, "PS": 16, "PAGES": 12}
K3: dict[str, Any] = {"H": 6, "KV": 1, "D": 64, "PS": 64, "PAGES": 12}
SMALL: dict[str, Any] = {"width": 6, "H": 2, "D": 16, "PS": 4, "PAGES": 24}

CONTRACT = Contract(
    axes={
        "R": "requests, width slots each",
        "H": "query heads",
        "KV": "key and value heads",
        "D": "channels of a query or key",
        "PG": "pages of the longest request",
        "PS": "tokens of a page",
        "PAGES": "pages of the pool",
    },
    args={
        "q": Arg("R*width H D", layout="rows"),
        "k": Arg("R*width KV D", layout="rows"),
        "v": Arg("R*width KV v_dim", layout="rows", optional=True),
        "k_cache": Arg("PAGES PS KV D", layout="rows"),
        "v_cache": Arg("PAGES PS KV v_dim", layout="rows", optional=True),
        "block_table": Arg("R PG", "i64"),
        "context_lens": Arg("R", "i64"),
        "width": Value(int, "slots of a block"),
        "v_dim": Value(int, "channels of a value"),
        "scale": Value(float, "of the scores"),
        "window": Value((int, type(None)), "tokens that a slot sees; None: all"),
        "window_from_anchor": Value(bool, "whether every slot's window ends at the anchor"),
        "causal": Value(bool, "whether a slot sees no later slot"),
    },
    returns={"out": Arg("R*width H*v_dim")},
    where=(
        "H % KV == 0",
        "width >= 1",
        "window is None or window >= 1",
        "v_dim <= D or v is not None",
        "(v is None) == (v_cache is None)",
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
            "speculators", **SMALL, KV=1, contexts=(0, 5, 30), window=7, anchored=True, causal=True
        ),
        Cell(
            "transformers, a window below the block", **SMALL, KV=2, contexts=(2, 31, 9), window=4
        ),
        Cell(
            "MLA, values in keys",
            ("tp1",),
            width=7,
            H=4,
            KV=1,
            D=96,
            V=64,
            PS=16,
            PAGES=9,
            contexts=(5, 40),
        ),
    ),
    tolerance=Tolerance(
        element_ulps=4,
        rms_ulps=1.5,
        fp32_element_ulps=64,
        fp32_rms_ulps=24,
        why="one rounding of a mean of values; scores of size 5 are exponents whose rounding is "
        "relative error of the shares; the row's largest bounds the rest",
    ),
    hazards=(
        Hazard("capacity", "a context past the block table is cut; only `valid` raises"),
        Hazard("stale_state", "a context row that nobody wrote is read as it is; nothing raises"),
        Hazard(
            "early_read",
            "lengths and tables are read before the wait: whatever writes them has ended when the "
            "previous launch starts",
            ("block_table", "context_lens"),
        ),
    ),
)
