"""Attention of Kimi K3 over a chunk of a prompt, beside torch's fused attention."""

from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops._lib.pools import positions
from tercel.ops.attention.mla_prefill.contract import HEAD
from tercel.ops.attention.mla_prefill.reference import expand

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")
KIB = 1024


def cell(
    why: str,
    layouts: tuple[str, ...],
    heads: int,
    tokens: int,
    *,
    context: int = 0,
    sequences: int = 1,
) -> Cell:
    """Sequences of `tokens` new tokens behind `context` entries each."""
    sizes = {"H": heads, "PS": 64, "PAGES": sequences * ((context + tokens) // 64) + 1}
    bounds = tuple(range(0, sequences * tokens + 1, tokens))
    contexts = (context,) * sequences
    return Cell(why, layouts, **HEAD, **sizes, gated=True, cu_seqlens=bounds, context_lens=contexts)


def sdpa(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    gate: torch.Tensor,
    *,
    cu_seqlens: tuple[int, ...],
    context_lens: tuple[int, ...],
    scale: float,
    **_: Any,
) -> torch.Tensor:
    """Expanded keys and values, values as wide as keys, which torch's kernels want."""
    outputs = []
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        length = context_lens[row] + stop - start
        where = positions(block_table[row], pages.shape[1])[:length]
        keys, values = expand(pages.flatten(0, 1)[where], w_k, w_v)
        padded = torch.nn.functional.pad(values, (0, keys.shape[2] - values.shape[2]))
        out = torch.nn.functional.scaled_dot_product_attention(
            q[start:stop].transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            padded.unsqueeze(0),
            attn_mask=causal_lower_right(stop - start, length),
            scale=scale,
        )
        outputs.append(out[0, :, :, : values.shape[2]].transpose(0, 1).flatten(1))
    return torch.cat(outputs) * gate


BENCH = Bench(
    cells=(
        cell("a prompt", LAYOUTS, 6, 4 * KIB),
        cell("a chunk behind a long context", LAYOUTS, 6, KIB, context=31 * KIB),
        cell("short prompts", LAYOUTS, 6, KIB, sequences=8),
        cell("a rank of eight", ("tp8_pp2",), 12, 2 * KIB),
        cell("every head", (), 96, KIB),
    ),
    baselines={"sdpa": sdpa},
)
