"""Absorbed MLA attention of a few new tokens per row over the paged latents, and its outputs.

    n = context_lens[r] + i + 1                          entries that token i of row r sees
    s[j] = scale * query[t, h] . entry[j]                j < n, fp32
    p = softmax(s)                                       fp32, not rounded
    u = act(sum_j p[j] * entry[j, :L])
    o[t, h] = act(w_v[h] u)
    out = act(o * gate)                                  where there is a gate, already sigmoid'ed

entry is page_scale * e4m3 code where the pages are FP8, fp32, not rounded.
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
from tercel.ops._lib import latent

HEAD = {"V": 128, "L": 512, "E": 576}
"""Sizes of the published models."""
NANO = {"H": 4, "PS": 16, "PAGES": 16}
TINY = {"V": 16, "L": 32, "E": 48, "H": 2, "PS": 16, "PAGES": 24}
RANK = "tp16_moetp4ep4"


def cell(name: str, layout: str, contexts: tuple[int, ...], **sizes: int) -> Cell:
    """A cell of one token per row with a gate, where `sizes` does not say otherwise."""
    usual = {**HEAD, "width": 1, "PS": 64, "gated": True}
    return Cell(name, (layout,) if layout else (), **{**usual, **sizes}, contexts=contexts)


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    width, heads, v_dim, rank, entry = (cell[axis] for axis in ("width", "H", "V", "L", "E"))
    contexts = cell["contexts"]
    tokens = len(contexts) * width
    lengths = [context + width for context in contexts]
    pages, table = latent.draw_cache(cell, make, lengths)
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
        "page_scale": latent.draw_page_scale(cell, make),
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
    values = tokens * heads * (entry + 2 * v_dim) + heads * v_dim * rank
    read = rows * context * sizes["pages_bytes"] // (sizes["PAGES"] * sizes["PS"])
    return Cost(
        bytes=values * sizes["act"] + read + 8 * rows * (sizes["PG"] + 1),
        flops=2 * tokens * heads * (context * (entry + rank) + v_dim * rank),
    )


CONTRACT = Contract(
    axes={
        "R": "rows, width tokens each",
        "H": "heads",
        "V": "v_head_dim",
        "PG": "pages of the longest row",
        **latent.AXES,
    },
    args={
        "query": Arg("R*width H E"),
        "pages": Arg("PAGES PS E", "act|e4m3"),
        "block_table": Arg("R PG", "i64"),
        "context_lens": Arg("R", "i64"),
        "w_v": Arg("H V L", layout="any"),
        "gate": Arg("R*width H*V", layout="rows", optional=True),
        "width": Value(int, "tokens per row: 1 + drafts"),
        "scale": Value(float, "(qk_nope_head_dim + qk_rope_head_dim)**-0.5"),
        "page_scale": latent.PAGE_SCALE,
    },
    returns={"out": Arg("R*width H*V")},
    where=("E >= L", "width >= 1", latent.SCALED),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        cell("nano: inside a page, at its ends", "tp1", (0, 7, 15, 16, 47), **NANO),
        cell("K3 rank of 16, seven drafts", RANK, (187,), width=8, H=6, PAGES=6),
        cell("a tile's ends, a new page, a row of nothing", RANK, (63, 64, 0, 250), H=6, PAGES=10),
        cell("the same, FP8 cache", RANK, (63, 64, 0, 250), H=6, PAGES=10, fp8=True),
        cell("no gate, as Kimi-Linear", "tp1", (3, 90, 61), **TINY, width=2, gated=False),
        cell("a rank of 8, FP8 cache", "tp8_pp2", (130, 64), H=12, PAGES=9, fp8=True),
        cell("every head on one rank", "", (130, 250), H=96, PAGES=9),
        cell(
            "drafts before, at and past a tile's end",
            RANK,
            (0, 50, 56, 191),
            width=8,
            H=6,
            PAGES=9,
            gated=False,
        ),
        cell("many tiles a part", "", (3000, 63, 2), H=96, PAGES=52),
    ),
    tolerance=Tolerance(
        element_ulps=8,
        rms_ulps=2,
        fp32_element_ulps=128,
        fp32_rms_ulps=40,
        why="scores of size 5 are exponents whose rounding is relative error of p, which a kernel "
        "rounds for tensor cores; u and o are rounded to activations once each and mix L values; "
        "the row's largest bounds the rest; in fp32 a mixture of hundreds of entries is a tenth of "
        "its terms, so that one element of thousands was 88 off, and the "
        "rms 11 to 28 by the draw",
    ),
    hazards=(
        Hazard("capacity", "a context past the block table is cut; only `valid` raises"),
        Hazard("early_read", "read before the wait", ("block_table", "context_lens", "w_v")),
        Hazard(
            "earlier_steps",
            "entries before context_lens are read before the wait: whoever writes the lengths of a "
            "step follows whoever wrote the entries that they count",
            ("pages",),
        ),
        Hazard("stale_state", "an entry that nobody appended is read as it is; nothing raises"),
    ),
)
