"""Absorbed queries and latents of an MLA whose last channels turn; nothing is stored.

    q = q_b @ act(rms_norm(q))                              q_nope | q_rope of K | E - L columns
    query[t, h] = act(w_k[h]^T q_nope) | act(rope(q_rope))
    entry[t]    = rms_norm(latent[:L]) | act(rope(latent[L:]))

rope turns pairs of channels by positions * inv_freq as qk_norm_rope does: rope_scale times cos and
sin, neighbours or one of each half. A query of this form meets entries directly: query . entry =
q_nope . k_nope + q_rope . k_rope. An entry is what context_latent stores of a context token. Norms
round twice as rms_norm.

Source: DeepSeek-V3 (transformers, modeling_deepseek_v3.py), the attention of K3DSparkModel;
absorption: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tercel.contract import Arg, Cell, Contract, Cost, Hazard, Tolerance, Value
from tercel.contract.contract import InputMaker
from tercel.core.rope import Rope


def inputs(cell: Cell, make: InputMaker) -> dict[str, Any]:
    tokens, q_rank, heads, k_dim, rank, entry = (cell[axis] for axis in "TQHKLE")
    kv_b = make.normal(heads, 2 * k_dim, rank, scale=rank**-0.5)
    frequencies = Rope(entry - rank, 5e4).inverse_frequencies
    q = make.normal(tokens, q_rank)
    return {
        "q": q,
        "q_norm": make.uniform(q_rank, low=0.5, high=1.5),
        "q_b": make.normal(heads * (k_dim + entry - rank), q_rank, scale=q_rank**-0.5),
        "latent": make.normal(tokens, entry),
        "kv_norm": make.uniform(rank, low=0.5, high=1.5),
        "w_k": kv_b[:, :k_dim],
        "inv_freq": torch.tensor(frequencies, dtype=torch.float32, device=q.device),
        "positions": make.integers(tokens, low=0, high=1 << 17),
        "eps": 1e-5,
        "rope_scale": cell.get("rope_scale", 1.0),
        "interleaved": cell.get("interleaved", True),
    }


def cost(sizes: Mapping[str, int]) -> Cost:
    tokens, q_rank, heads, k_dim, rank, entry = (sizes[axis] for axis in "TQHKLE")
    width = heads * (k_dim + entry - rank)
    weights = (width + 1) * q_rank + heads * k_dim * rank + rank
    values = tokens * (q_rank + (2 + heads) * entry) + weights
    return Cost(
        bytes=values * sizes["act"] + 2 * (entry - rank) + 8 * tokens,
        flops=2 * tokens * (width * q_rank + heads * k_dim * rank),
    )


CONTRACT = Contract(
    axes={
        "T": "tokens",
        "Q": "q_lora_rank",
        "H": "heads",
        "K": "qk_nope_head_dim",
        "L": "kv_lora_rank",
        "E": "an entry of the cache: kv_lora_rank + qk_rope_head_dim",
    },
    args={
        "q": Arg("T Q", layout="rows"),
        "q_norm": Arg("Q"),
        "q_b": Arg("H*(K+E-L) Q"),
        "latent": Arg("T E", layout="rows"),
        "kv_norm": Arg("L"),
        "w_k": Arg("H K L", layout="any"),
        "inv_freq": Arg("(E-L)//2", "f32"),
        "positions": Arg("T", "i64"),
        "eps": Value(float, "of both norms"),
        "rope_scale": Value(float, "of cos and sin; 1 without YaRN"),
        "interleaved": Value(bool, "whether neighbouring channels turn together"),
    },
    returns={"query": Arg("T H E"), "entry": Arg("T E")},
    where=("E > L", "(E - L) % 2 == 0"),
    cost=cost,
    inputs=inputs,
    cells=(
        Cell("nano drafter, a block", ("tp1",), T=7, Q=64, H=4, K=32, L=96, E=112),
        Cell("K3 drafter, rank of 16", ("tp16_moetp4ep4",), T=7, Q=1536, H=4, K=128, L=512, E=576),
        Cell("halves, a scale", T=3, Q=16, H=2, K=8, L=16, E=24, interleaved=False, rope_scale=1.2),
    ),
    tolerance=Tolerance(
        element_ulps=6,
        rms_ulps=2,
        fp32_element_ulps=48,
        fp32_rms_ulps=16,
        why="three roundings to activations, each passed on by a product or a rotation; in fp32 "
        "sums over Q and K",
    ),
    hazards=(
        Hazard("early_read", "read before the wait", ("q_norm", "q_b", "w_k")),
        Hazard("silent_input", "pairs other than those trained on draft badly; nothing raises"),
        Hazard("silent_input", "positions off by one draft badly; nothing raises", ("positions",)),
    ),
)
