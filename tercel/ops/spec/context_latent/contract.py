"""Latents of context tokens for all layers of an MLA drafter, written into its pages.

    c | k = act(x @ weight^T)                       per layer l: L | E - L channels
    pages[l, slot_mapping // PS, slot_mapping % PS] = rms_norm(c, kv_norm[l]) | act(rope(k))

x is the normed projection of the taps, the same for every layer. An entry is what mla_query_rope
gives for a slot of a block. Which tokens are written, and why also rejected ones: see context_kv.
Norms round twice as rms_norm; page 0 is the sink of padded tokens.

Source: DSpark, arXiv 2607.05147; DeepSeek-V3 for latent and rotation, as in K3DSparkModel.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.core.rope import Rope
from tercel.ops._lib.pools import check_slots


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, layers, hidden, rank, entry = (cell[x] for x in ("T", "LAYERS", "N", "L", "E"))
    pages, page_size = cell["PAGES"], cell["PS"]
    frequencies = Rope(entry - rank, 5e4).inverse_frequencies
    x = make.normal(tokens, hidden)
    return {
        "x": x,
        "weight": make.normal(layers * entry, hidden, scale=hidden**-0.5),
        "kv_norm": make.uniform(layers, rank, low=0.5, high=1.5),
        "inv_freq": torch.tensor(frequencies, dtype=torch.float32, device=x.device),
        "positions": make.integers(tokens, low=0, high=1 << 17),
        "pages": make.poison(layers, pages, page_size, entry),
        "slot_mapping": make.choice(tokens, low=page_size, high=pages * page_size),
        "eps": 1e-5,
        "rope_scale": cell.get("rope_scale", 1.0),
        "interleaved": cell.get("interleaved", True),
    }


def valid(*, pages: torch.Tensor, slot_mapping: torch.Tensor, **_: Any) -> None:
    check_slots(slot_mapping, pages.shape[1] * pages.shape[2], "slot_mapping")


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, layers, hidden, entry = (sizes[x] for x in ("T", "LAYERS", "N", "E"))
    values = tokens * hidden + layers * (entry * (hidden + tokens) + sizes["L"])
    return Cost(
        bytes=values * sizes["act"] + 2 * (entry - sizes["L"]) + 16 * tokens,
        flops=2 * tokens * layers * entry * hidden,
    )


CONTRACT = Contract(
    axes={
        "T": "tokens",
        "N": "hidden size",
        "LAYERS": "layers of the drafter",
        "L": "kv_lora_rank",
        "E": "an entry of the cache: kv_lora_rank + qk_rope_head_dim",
        "PS": "tokens of a page",
        "PAGES": "pages of the pool",
    },
    args={
        "x": Arg("T N", layout="rows"),
        "weight": Arg("LAYERS*E N"),
        "kv_norm": Arg("LAYERS L"),
        "inv_freq": Arg("(E-L)//2", "f32"),
        "positions": Arg("T", "i64"),
        "pages": Arg("LAYERS PAGES PS E", written="the entries at slot_mapping, of every layer"),
        "slot_mapping": Arg("T", "i64"),
        "eps": Value(float, "of the latent's norm"),
        "rope_scale": Value(float, "of cos and sin; 1 without YaRN"),
        "interleaved": Value(bool, "whether neighbouring channels turn together"),
    },
    returns={},
    where=("E > L", "(E - L) % 2 == 0"),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano, a verify step", ("tp1",), T=8, N=64, LAYERS=2, L=96, E=112, PS=16, PAGES=4),
        Cell("K3 verify", ("tp16_moetp4ep4",), T=8, N=7168, LAYERS=5, L=512, E=576, PS=64, PAGES=2),
        Cell("two halves", T=5, N=48, LAYERS=3, L=8, E=16, PS=4, PAGES=4, interleaved=False),
    ),
    tolerance=Tolerance(
        element_ulps=8,
        rms_ulps=2,
        fp32_element_ulps=64,
        fp32_rms_ulps=16,
        why="three roundings at most, and the sum over N in any order, which the norm divides by "
        "its size",
    ),
    hazards=(
        Hazard(
            "early_read",
            "weight, norm and frequencies are read before the wait",
            ("weight", "kv_norm", "inv_freq"),
        ),
        Hazard("aliasing", "two tokens at one live position race; nothing raises"),
        Hazard("capacity", "positions outside the pool are undefined; nothing raises"),
        Hazard("silent_input", "positions off by one draft badly; nothing raises", ("positions",)),
    ),
)
