"""Keys and values of context tokens for all layers of a GQA drafter, written into its pages.

    k | v = act(x @ weight^T)                       per layer l, KV heads of D channels each
    k = act(rope(k * rsqrt(mean(k**2) + eps) * k_norm[l]))       fp32 inside, per head
    pages[l, slot_mapping // PS, slot_mapping % PS] = k | v

x is the normed projection of the taps, the same for every layer. The pages are indexed as the
target's: the same block tables and slot mapping serve both, so whatever restores, moves or frees
the target's pages does so with the drafter's; page 0 is the sink of padded tokens.

Every token of a step is written, rejected drafts too. They lie at or past the new end of their
request, where block_attention does not look, and the next step writes these positions again before
its end gets there. So the projection does not wait for the acceptance.

Source: DSpark, arXiv 2607.05147; DFlash, arXiv 2602.06036; Qwen3 for norm and rotation.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.core.rope import Rope
from tercel.ops._lib.pools import check_slots


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, layers, hidden = cell["T"], cell["L"], cell["N"]
    kv_heads, dim, pages, page_size = cell["KV"], cell["D"], cell["PAGES"], cell["PS"]
    frequencies = torch.tensor(Rope(dim, 1e4).inverse_frequencies, dtype=torch.float32)
    x = make.normal(tokens, hidden)
    meetings = layers * 2 * kv_heads * -(-tokens // 8)
    return {
        "x": x,
        "weight": make.normal(layers * 2 * kv_heads * dim, hidden, scale=hidden**-0.5),
        "k_norm": make.uniform(layers, dim, low=0.5, high=1.5),
        "inv_freq": frequencies.to(x.device),
        "positions": make.integers(tokens, low=0, high=1 << 17),
        "pages": make.poison(layers, pages, page_size, 2, kv_heads, dim),
        "slot_mapping": make.choice(tokens, low=page_size, high=pages * page_size),
        "eps": 1e-5,
        "rope_scale": cell.get("rope_scale", 1.0),
        "interleaved": cell.get("interleaved", False),
        "counters": make.integers(meetings, low=0, high=1, dtype="i32"),
    }


def valid(*, pages: torch.Tensor, slot_mapping: torch.Tensor, **_: Any) -> None:
    check_slots(slot_mapping, pages.shape[1] * pages.shape[2], "slot_mapping")


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, layers, hidden = sizes["T"], sizes["L"], sizes["N"]
    entry = 2 * sizes["KV"] * sizes["D"]
    values = tokens * hidden + layers * (entry * hidden + tokens * entry + sizes["D"])
    return Cost(
        bytes=values * sizes["act"] + 2 * sizes["D"] + 16 * tokens,
        flops=2 * tokens * layers * entry * hidden,
    )


CONTRACT = Contract(
    axes={
        "T": "tokens",
        "N": "hidden size",
        "L": "layers of the drafter",
        "KV": "key and value heads of this rank",
        "D": "channels of a head",
        "PS": "tokens of a page",
        "PAGES": "pages of the pool",
        "COUNTERS": "where programs of a launch meet",
    },
    args={
        "x": Arg("T N", layout="rows"),
        "weight": Arg("L*2*KV*D N"),
        "k_norm": Arg("L D"),
        "inv_freq": Arg("D//2", "f32"),
        "positions": Arg("T", "i64"),
        "pages": Arg("L PAGES PS 2 KV D", written="the entries at slot_mapping, of every layer"),
        "slot_mapping": Arg("T", "i64"),
        "eps": Value(float, "of the norm of keys"),
        "rope_scale": Value(float, "of cos and sin; 1 without YaRN"),
        "interleaved": Value(bool, "whether neighbouring channels turn together"),
        "counters": Arg("COUNTERS", "i32", optional=True),
    },
    returns={},
    where=("D % 2 == 0",),
    cost=cost,
    inputs=inputs,
    valid=valid,
    cells=(
        Cell("nano, a verify step", ("tp1",), T=8, N=256, L=2, KV=2, D=64, PS=16, PAGES=4),
        Cell("nano, prefill", ("tp1",), T=65, N=256, L=2, KV=2, D=64, PS=16, PAGES=6),
        Cell("a hidden size among programs", T=3, N=1040, L=1, KV=1, D=64, PS=4, PAGES=3),
        Cell("rank of 16", ("tp16_moetp4ep4",), T=8, N=7168, L=5, KV=1, D=64, PS=64, PAGES=3),
        Cell(
            "neighbouring pairs and a YaRN scale",
            T=5,
            N=48,
            L=3,
            KV=2,
            D=16,
            PS=4,
            PAGES=4,
            interleaved=True,
            rope_scale=1.2,
        ),
    ),
    tolerance=Tolerance(
        element_ulps=6,
        rms_ulps=1.5,
        fp32_element_ulps=16,
        fp32_rms_ulps=8,
        why="keys are rounded after the product and after the rotation, values once; the sum over "
        "7168 terms by parts (5.5 and 3.0 seen), which the norm then divides by its size",
    ),
    hazards=(
        Hazard("aliasing", "two tokens at one live position race; nothing raises"),
        Hazard("aliasing", "two calls at once on the same counters mix their sums", ("counters",)),
        Hazard("capacity", "positions outside the pool are undefined; nothing raises"),
        Hazard("silent_input", "positions off by one draft badly; nothing raises", ("positions",)),
        Hazard(
            "early_read",
            "weight, norm and frequencies are read before the wait",
            ("weight", "k_norm", "inv_freq"),
        ),
    ),
)
