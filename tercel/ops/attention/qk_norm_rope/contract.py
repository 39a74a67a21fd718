"""Queries and keys of a packed projection: RMSNorm per head, then RoPE.

    q | k | v = qkv                                   per token: H, KV and KV heads of D channels
    y = x * rsqrt(mean(x**2) + eps) * norm            x a head of q or k
    a = positions * inv_freq                          fp64
    q', k' = act(y1 * cos a - y2 * sin a, y2 * cos a + y1 * sin a)      times rope_scale

(y1, y2) are the halves of a head (NeoX), or its even and odd channels. fp32 inside, one rounding.
inv_freq and rope_scale carry YaRN where there is one: tercel.core.rope. v is left where it is.

Source: Qwen3 (transformers, modeling_qwen3.py), the backbone of the GQA drafters of Kimi K3.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.core.rope import Rope


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, heads, kv_heads, dim = (cell[axis] for axis in ("T", "H", "KV", "D"))
    qkv = make.normal(tokens, (heads + 2 * kv_heads) * dim)
    qkv[::3] *= 1e-3  # short enough for eps to count
    frequencies = torch.tensor(Rope(dim, 1e4).inverse_frequencies, dtype=torch.float32)
    return {
        "qkv": qkv,
        "q_norm": make.uniform(dim, low=0.5, high=1.5),
        "k_norm": make.uniform(dim, low=0.5, high=1.5),
        "inv_freq": frequencies.to(qkv.device),
        "positions": make.integers(tokens, low=0, high=cell["positions"]),
        "heads": heads,
        "kv_heads": kv_heads,
        "eps": 1e-5,
        "rope_scale": cell.get("rope_scale", 1.0),
        "interleaved": cell.get("interleaved", False),
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    values = sizes["T"] * (sizes["heads"] + sizes["kv_heads"]) * sizes["D"]
    moved = (2 * values + 2 * sizes["D"]) * sizes["act"] + 2 * sizes["D"] + 8 * sizes["T"]
    return Cost(bytes=moved, flops=7 * values)


CONTRACT = Contract(
    axes={"T": "tokens", "D": "channels of a head"},
    args={
        "qkv": Arg("T (heads+2*kv_heads)*D", layout="rows"),
        "q_norm": Arg("D"),
        "k_norm": Arg("D"),
        "inv_freq": Arg("D//2", "f32"),
        "positions": Arg("T", "i64"),
        "heads": Value(int, "query heads of this rank"),
        "kv_heads": Value(int, "key and value heads of this rank"),
        "eps": Value(float, "inside the root"),
        "rope_scale": Value(float, "of cos and sin; 1 without YaRN"),
        "interleaved": Value(bool, "whether neighbouring channels turn together"),
    },
    returns={"q": Arg("T heads D"), "k": Arg("T kv_heads D")},
    where=("D % 2 == 0", "heads % kv_heads == 0"),
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano drafter, a block", ("tp1",), T=7, H=4, KV=2, D=64, positions=4096),
        Cell(
            "K3 drafter, rank of 16", ("tp16_moetp4ep4",), T=7, H=6, KV=1, D=64, positions=1 << 20
        ),
        Cell(
            "neighbouring pairs and a YaRN scale",
            T=9,
            H=2,
            KV=2,
            D=16,
            positions=512,
            interleaved=True,
            rope_scale=1.2,
        ),
    ),
    tolerance=Tolerance(
        element_ulps=2.5,
        rms_ulps=1,
        fp32_element_ulps=8,
        fp32_rms_ulps=4,
        why="one rounding; a row's largest element may sit just above a power of two; in fp32 the "
        "sum over D, the root and two products",
    ),
    hazards=(
        Hazard("silent_input", "pairs other than those trained on draft badly; nothing raises"),
        Hazard("silent_input", "positions off by one draft badly; nothing raises", ("positions",)),
        Hazard(
            "early_read",
            "norms and frequencies are read before the wait",
            ("q_norm", "k_norm", "inv_freq"),
        ),
    ),
)
