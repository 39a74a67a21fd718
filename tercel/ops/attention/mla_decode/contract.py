"""Absorbed MLA attention of a few new tokens per row over the paged latents, and its outputs.

    n = context_lens[r] + i + 1                          entries that token i of row r sees
    s[j] = scale * query[t, h] . entry[j]                j < n, fp32
    p = softmax(s)                                       fp32, not rounded
    u = act(sum_j p[j] * entry[j, :L])
    o[t, h] = act(w_v[h] u)
    out = act(o * gate)                                  where there is a gate, already sigmoid'ed

The row's own tokens, drafts among them, are in the pages already. Entry j of row r lies in page
block_table[r, j // PS]; page 0 is the sink. Whatever lies past a row's end, NaN included, has no
effect. Padding rows have context 0: their outputs are those of the sink's first entries.

Source: Kimi K3 modeling_kimi_linear.py, KimiMLAAttention (output gate); absorption: DeepSeek-V2,
arXiv 2405.04434, section 2.1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.errors import ContractError
from tercel.ops._lib.pools import draw_pages


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    width, heads, v_dim, rank, entry = (cell[axis] for axis in ("width", "H", "V", "L", "E"))
    contexts = cell["contexts"]
    tokens = len(contexts) * width
    stored = make.normal(cell["PAGES"], cell["PS"], entry)
    pages, table = draw_pages(make, [context + width for context in contexts], stored)
    kv_b = make.normal(heads, 2 * v_dim, rank, scale=rank**-0.5)
    gate = make.uniform(tokens, heads * v_dim, low=0.0, high=1.0)
    return {
        "query": make.normal(tokens, heads, entry),
        "pages": pages,
        "block_table": table,
        "context_lens": torch.tensor(contexts, device=table.device),
        "w_v": kv_b[:, v_dim:],
        "gate": gate if cell["gated"] else None,
        "width": width,
        "scale": 192**-0.5,
    }


def valid(
    *,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    width: int,
    **_: Any,
) -> None:
    room = block_table.shape[1] * pages.shape[1]
    longest = int(context_lens.max()) + width
    if longest > room:
        raise ContractError(f"context_lens: {longest} tokens, the block table holds {room}")
    if int(block_table.max()) >= pages.shape[0]:
        raise ContractError(f"block_table: page {int(block_table.max())} of {pages.shape[0]}")


def cost(sizes: Mapping[str, int]) -> Cost:
    """Rows at the capacity of the block table; a shorter context costs less."""
    rows, width, heads, v_dim, rank, entry = (
        sizes[axis] for axis in ("R", "width", "H", "V", "L", "E")
    )
    tokens, context = rows * width, sizes["PG"] * sizes["PS"]
    values = rows * context * entry + tokens * heads * (entry + 2 * v_dim) + heads * v_dim * rank
    return Cost(
        bytes=values * sizes["act"] + 8 * rows * (sizes["PG"] + 1),
        flops=2 * tokens * heads * (context * (entry + rank) + v_dim * rank),
    )


CONTRACT = Contract(
    axes={
        "R": "rows, width tokens each",
        "H": "heads",
        "V": "v_head_dim",
        "L": "kv_lora_rank",
        "E": "an entry of the cache: kv_lora_rank + qk_rope_head_dim",
        "PG": "pages of the longest row",
        "PS": "tokens of a page",
        "PAGES": "pages of the pool; page 0 is the sink",
    },
    args={
        "query": Arg("R*width H E"),
        "pages": Arg("PAGES PS E"),
        "block_table": Arg("R PG", "i64"),
        "context_lens": Arg("R", "i64"),
        "w_v": Arg("H V L", layout="any"),
        "gate": Arg("R*width H*V", layout="rows", optional=True),
        "width": Value(int, "tokens per row: 1 + drafts"),
        "scale": Value(float, "(qk_nope_head_dim + qk_rope_head_dim)**-0.5"),
    },
    returns={"out": Arg("R*width H*V")},
    where=("E >= L", "width >= 1"),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell(
            "nano, a batch: empty, inside a page, at its ends",
            layouts=("tp1",),
            width=1,
            H=4,
            V=128,
            L=512,
            E=576,
            PS=16,
            PAGES=16,
            contexts=(0, 7, 15, 16, 47),
            gated=True,
        ),
        Cell(
            "K3 rank of 16, one request, seven drafts",
            layouts=("tp16_moetp4ep4",),
            width=8,
            H=6,
            V=128,
            L=512,
            E=576,
            PS=64,
            PAGES=6,
            contexts=(187,),
            gated=True,
        ),
        Cell(
            "no gate, as Kimi-Linear",
            layouts=("tp1",),
            width=2,
            H=2,
            V=16,
            L=32,
            E=48,
            PS=4,
            PAGES=24,
            contexts=(3, 30, 21),
            gated=False,
        ),
    ),
    tolerance=Tolerance(
        element_ulps=8,
        rms_ulps=2,
        fp32_element_ulps=64,
        fp32_rms_ulps=24,
        why="scores of size 5 are exponents whose rounding is relative error of p; u and o are "
        "rounded to activations once each and mix L values; the row's largest bounds the rest",
    ),
    hazards=(
        Hazard("capacity", "a context past the block table is cut; only `valid` raises"),
        Hazard("stale_state", "an entry that nobody appended is read as it is; nothing raises"),
    ),
)
