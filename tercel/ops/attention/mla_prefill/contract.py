"""Causal MLA attention of sequences' new tokens over the paged latents, the context included.

    c | k_rope = entry                  of every cached token; act(page_scale * code) where FP8
    k_nope[h] = act(w_k[h] c);  v[h] = act(w_v[h] c)       expanded
    s[i, j] = scale * (q_nope . k_nope + q_rope . k_rope)  j <= context + i, fp32
    out = act(act(softmax(s) v) * gate)                    fp32 softmax, not rounded

The new tokens' own entries are in the pages already. Entry j of row r lies in page
block_table[r, j // PS]; what lies past a row's end has no effect. A long context is walked in
windows whose softmax sums are merged, so the workspace does not grow with it.

Source: Kimi K3 modeling_kimi_linear.py, KimiMLAAttention (output gate).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.errors import ContractError
from tercel.ops._lib import latent
from tercel.ops._lib.pools import check_cu_seqlens

HEAD = {"K": 128, "V": 128, "L": 512, "E": 576}
"""Sizes of the published models."""
CHUNK = {"PS": 64, "PAGES": 6, "gated": True, **HEAD}


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    heads, k_dim, v_dim, rank, entry = (cell[axis] for axis in ("H", "K", "V", "L", "E"))
    bounds, contexts = cell["cu_seqlens"], cell["context_lens"]
    lengths = [
        context + stop - start
        for context, (start, stop) in zip(contexts, pairwise(bounds), strict=True)
    ]
    pages, table = latent.draw_cache(cell, make, lengths)
    kv_b = make.normal(heads, k_dim + v_dim, rank, scale=rank**-0.5)
    gate = make.uniform(bounds[-1], heads * v_dim, low=0.0, high=1.0)
    return {
        "q": make.normal(bounds[-1], heads, k_dim + entry - rank),
        "pages": pages,
        "block_table": table,
        "w_k": kv_b[:, :k_dim],
        "w_v": kv_b[:, k_dim:],
        "gate": gate if cell["gated"] else None,
        "cu_seqlens": bounds,
        "context_lens": contexts,
        "scale": (k_dim + entry - rank) ** -0.5,
        "page_scale": latent.draw_page_scale(cell, make),
    }


def valid(
    *,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: tuple[int, ...],
    context_lens: tuple[int, ...],
    **_: Any,
) -> None:
    check_cu_seqlens(cu_seqlens)
    room = block_table.shape[1] * pages.shape[1]
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        if context_lens[row] + stop - start > room:
            raise ContractError(f"context_lens: row {row} is longer than its {room} positions")


def cost(sizes: Mapping[str, int]) -> Cost:
    """Rows at the capacity of the block table; a shorter context costs less."""
    tokens, heads, k_dim, v_dim, rank, entry = (sizes[axis] for axis in "THKVLE")
    context = sizes["N"] * sizes["PG"] * sizes["PS"]
    width = k_dim + entry - rank
    values = heads * (tokens * (width + 2 * v_dim) + (k_dim + v_dim) * rank)
    read = context * sizes["pages_bytes"] // (sizes["PAGES"] * sizes["PS"])
    expand = context * (k_dim + v_dim) * rank
    attend = tokens * sizes["PG"] * sizes["PS"] * (width + v_dim)
    return Cost(
        bytes=values * sizes["act"] + read + 8 * sizes["N"] * sizes["PG"],
        flops=2 * heads * (expand + attend),
    )


CONTRACT = Contract(
    axes={
        "T": "tokens of all sequences",
        "N": "sequences",
        "H": "heads",
        "K": "qk_nope_head_dim",
        "V": "v_head_dim",
        "PG": "pages of the longest row",
        **latent.AXES,
    },
    args={
        "q": Arg("T H K+E-L", layout="rows"),
        "pages": Arg("PAGES PS E", "act|e4m3"),
        "block_table": Arg("N PG", "i64"),
        "w_k": Arg("H K L", layout="any"),
        "w_v": Arg("H V L", layout="any"),
        "gate": Arg("T H*V", layout="rows", optional=True),
        "cu_seqlens": Value(tuple, "sequence n is tokens cu_seqlens[n] .. cu_seqlens[n + 1]"),
        "context_lens": Value(tuple, "entries before this step, per sequence"),
        "scale": Value(float, "(qk_nope_head_dim + qk_rope_head_dim)**-0.5"),
        "page_scale": latent.PAGE_SCALE,
    },
    returns={"out": Arg("T H*V")},
    where=(
        "E >= L",
        "len(cu_seqlens) == N + 1",
        "len(context_lens) == N",
        "cu_seqlens[-1] == T",
        latent.SCALED,
    ),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell(
            "nano: a prompt, a later chunk, one token and none, in one step",
            ("tp1",),
            **{"H": 4, "PS": 16, "PAGES": 24, "gated": True, **HEAD},
            cu_seqlens=(0, 50, 83, 84, 84),
            context_lens=(0, 70, 31, 5),
        ),
        Cell(
            "K3 rank of 16, a chunk behind a context",
            ("tp16_moetp4ep4",),
            **{"H": 6, **CHUNK, "cu_seqlens": (0, 40), "context_lens": (200,)},
        ),
        Cell(
            "windows of context, no gate",
            ("tp1",),
            **{"H": 2, "PS": 8, "PAGES": 200, "gated": False},
            **{"K": 16, "V": 24, "L": 32, "E": 40},
            cu_seqlens=(0, 9, 600),
            context_lens=(900, 0),
        ),
        Cell(
            "a rank of 8, FP8 cache",
            ("tp8_pp2",),
            **{"H": 12, **CHUNK, "cu_seqlens": (0, 33), "context_lens": (100,), "fp8": True},
        ),
        Cell("every head", (), **{"H": 96, **CHUNK, "cu_seqlens": (0, 20), "context_lens": (70,)}),
    ),
    tolerance=Tolerance(
        element_ulps=8,
        rms_ulps=2.5,
        fp32_element_ulps=64,
        fp32_rms_ulps=24,
        why="keys and values are rounded once, and p where a kernel multiplies on tensor cores, "
        "which the softmax averages; scores of size 5 are exponents whose rounding is relative "
        "error of p; two roundings at the end",
    ),
    hazards=(
        Hazard("capacity", "a row past its block table is cut; only `valid` raises"),
        Hazard("stale_state", "an entry that nobody appended is read as it is; nothing raises"),
    ),
)
