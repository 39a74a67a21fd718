"""Writes tokens' latents into the paged cache of an MLA layer.

    c | k_rope = latent
    c = act(c * rsqrt(mean(c**2) + eps)) * kv_norm           two roundings, as rms_norm
    pages[slot_mapping // PS, slot_mapping % PS] = c | k_rope

or, with a page_scale, e4m3((c | k_rope) / page_scale): fp32, to nearest, saturated at 448.

k_rope is neither normalised nor rotated (NoPE). eps is 1e-6: the published model builds this norm
with its class default, not with rms_norm_eps.

Source: Kimi K3 modeling_kimi_linear.py, KimiMLAAttention (kv_a_layernorm).
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.ops._lib.latent import AXES, PAGE_SCALE, SCALED, draw_page_scale, page_dtype
from tercel.ops._lib.pools import check_slots


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    pages, page_size, entry = cell["PAGES"], cell["PS"], cell["E"]
    return {
        "latent": make.normal(cell["T"], entry),
        "kv_norm": make.uniform(cell["L"], low=0.5, high=1.5),
        "pages": make.poison(pages, page_size, entry, dtype=page_dtype(cell)),
        "slot_mapping": make.choice(cell["T"], low=page_size, high=pages * page_size),
        "eps": 1e-6,
        "page_scale": draw_page_scale(cell, make),
    }


def valid(*, pages: torch.Tensor, slot_mapping: torch.Tensor, **_: Any) -> None:
    check_slots(slot_mapping, pages.shape[0] * pages.shape[1], "slot_mapping")


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, entry, rank = sizes["T"], sizes["E"], sizes["L"]
    stored = tokens * sizes["pages_bytes"] // (sizes["PAGES"] * sizes["PS"])
    values = tokens * entry + rank
    return Cost(bytes=values * sizes["act"] + stored + 8 * tokens, flops=4 * tokens * rank)


CONTRACT = Contract(
    axes={
        "T": "tokens",
        **AXES,
    },
    args={
        "latent": Arg("T E", layout="rows"),
        "kv_norm": Arg("L"),
        "pages": Arg("PAGES PS E", "act|e4m3", written="the entries at slot_mapping"),
        "slot_mapping": Arg("T", "i64"),
        "eps": Value(float, "1e-6 as published"),
        "page_scale": PAGE_SCALE,
    },
    returns={},
    where=("E >= L", SCALED),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano prefill", layouts=("tp1",), T=33, L=512, E=576, PAGES=5, PS=16),
        Cell(
            "K3, one token; every rank holds the whole cache",
            layouts=("tp16_moetp4ep4", "tp16_moetp16ep1"),
            T=1,
            L=512,
            E=576,
            PAGES=3,
            PS=64,
        ),
        Cell("FP8 cache", ("tp1",), T=5, L=512, E=576, PAGES=3, PS=64, fp8=True),
    ),
    tolerance=Tolerance(
        element_ulps=4,
        rms_ulps=1.5,
        why="as rms_norm: two roundings of half an ulp each plus the fp32 sum; where the cache is "
        "FP8, its rounding alone",
    ),
    hazards=(
        Hazard("aliasing", "two tokens at one live position race; nothing raises"),
        Hazard("capacity", "positions outside the pool are undefined; nothing raises"),
        Hazard("silent_input", "another page_scale than the readers'; nothing raises"),
    ),
)
