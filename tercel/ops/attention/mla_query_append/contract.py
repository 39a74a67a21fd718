"""The absorbed query of an MLA layer, and its tokens' latents written into the cache.

    q = q_b @ act(rms_norm(q))                      with a query latent, eps q_eps; else q as it is
    q_nope | q_rope = q[t, h]                       K | E - L columns
    query[t, h] = act(w_k[h]^T q_nope) | q_rope     [L] | [E - L], nothing is rotated (NoPE)
    pages at slot_mapping = the latents, as mla_append writes them

A query of this form meets the cached entries directly: query . entry = q_nope . k_nope + q_rope .
k_rope. Norms round twice as rms_norm; both their eps are 1e-6 as published.

Source: Kimi K3 modeling_kimi_linear.py, KimiMLAAttention; absorption: DeepSeek-V2, arXiv
2405.04434, section 2.1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.latent import AXES, PAGE_SCALE, SCALED, draw_page_scale, page_dtype
from tercel.ops._lib.pools import check_slots

HEAD = {"K": 128, "L": 512, "E": 576}
"""Sizes of the published models."""
LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, heads, k_dim, rank, entry = (cell[axis] for axis in ("T", "H", "K", "L", "E"))
    pages, page_size = cell["PAGES"], cell["PS"]
    width, q_rank = heads * (k_dim + entry - rank), cell["Q"]
    direct = q_rank == width
    kv_b = make.normal(heads, 2 * k_dim, rank, scale=rank**-0.5)
    return {
        "q": make.normal(tokens, q_rank),
        "q_norm": None if direct else make.uniform(q_rank, low=0.5, high=1.5),
        "q_b": None if direct else make.normal(width, q_rank, scale=q_rank**-0.5),
        "latent": make.normal(tokens, entry),
        "kv_norm": make.uniform(rank, low=0.5, high=1.5),
        "w_k": kv_b[:, :k_dim],
        "pages": make.poison(pages, page_size, entry, dtype=page_dtype(cell)),
        "slot_mapping": make.choice(tokens, low=page_size, high=pages * page_size),
        "q_eps": 1e-6,
        "eps": 1e-6,
        "page_scale": draw_page_scale(cell, make),
    }


def valid(*, pages: torch.Tensor, slot_mapping: torch.Tensor, **_: Any) -> None:
    check_slots(slot_mapping, pages.shape[0] * pages.shape[1], "slot_mapping")


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, heads, k_dim, rank, entry, q_rank = (sizes[axis] for axis in "THKLEQ")
    width = heads * (k_dim + entry - rank)
    q_b = 0 if q_rank == width else (width + 1) * q_rank
    values = tokens * (q_rank + (1 + heads) * entry) + q_b + heads * k_dim * rank + rank
    stored = tokens * sizes["pages_bytes"] // (sizes["PAGES"] * sizes["PS"])
    return Cost(
        bytes=values * sizes["act"] + stored + 8 * tokens,
        flops=2 * tokens * (q_b + heads * k_dim * rank),
    )


CONTRACT = Contract(
    axes={
        "T": "tokens",
        "Q": "q_lora_rank, or H * (K + E - L) where queries have no latent",
        "H": "heads",
        "K": "qk_nope_head_dim",
        **AXES,
    },
    args={
        "q": Arg("T Q", layout="rows"),
        "q_norm": Arg("Q", optional=True),
        "q_b": Arg("H*(K+E-L) Q", optional=True),
        "latent": Arg("T E", layout="rows"),
        "kv_norm": Arg("L"),
        "w_k": Arg("H K L", layout="any"),
        "pages": Arg("PAGES PS E", "act|e4m3", written="the entries at slot_mapping"),
        "slot_mapping": Arg("T", "i64"),
        "q_eps": Value(float, "of the query latent's norm, 1e-6"),
        "eps": Value(float, "of the latent's norm, 1e-6"),
        "page_scale": PAGE_SCALE,
    },
    returns={"query": Arg("T H E")},
    where=(
        "E >= L",
        "(q_norm is None) == (q_b is None)",
        "q_b is not None or Q == H * (K + E - L)",
        SCALED,
    ),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano, a batch", ("tp1",), **HEAD, T=8, Q=128, H=4, PAGES=4, PS=16),
        Cell("K3 rank of 16, one token", LAYOUTS, **HEAD, T=1, Q=1536, H=6, PAGES=3, PS=64),
        Cell(
            "Kimi-Linear: queries without a latent",
            ("tp1",),
            **HEAD,
            T=3,
            Q=32 * 192,
            H=32,
            PAGES=3,
            PS=64,
        ),
        Cell("more tokens than registers hold", T=19, Q=96, H=3, K=24, L=80, E=96, PAGES=5, PS=16),
        Cell("FP8 cache", ("tp1",), **HEAD, T=2, Q=128, H=4, PAGES=4, PS=16, fp8=True),
    ),
    tolerance={
        "query": Tolerance(
            element_ulps=6,
            rms_ulps=2,
            fp32_element_ulps=48,
            fp32_rms_ulps=16,
            why="three roundings to activations, each passed on by a product; in fp32 sums over "
            "Q and K",
        ),
        "pages": Tolerance(
            element_ulps=4,
            rms_ulps=1.5,
            fp32_element_ulps=2,
            fp32_rms_ulps=2,
            why="as mla_append, of the same rows: two roundings, and a GPU's rsqrt in fp32",
        ),
    },
    hazards=(
        Hazard("aliasing", "two tokens at one live position race; nothing raises"),
        Hazard("early_read", "read before the wait", ("q_norm", "q_b", "w_k")),
        Hazard("silent_input", "another page_scale than the readers'; nothing raises"),
    ),
)
