"""Expanded keys and values and one softmax per row, in at least fp32."""

from itertools import pairwise

import torch

from tercel.ops._lib.latent import loaded
from tercel.ops._lib.pools import positions


def mla_prefill(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    cu_seqlens: tuple[int, ...],
    context_lens: tuple[int, ...],
    scale: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    work = torch.promote_types(q.dtype, torch.float32)
    outputs = []
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        context, count = context_lens[row], stop - start
        where = positions(block_table[row], pages.shape[1])[: context + count]
        entries = loaded(pages.flatten(0, 1)[where], work, page_scale).to(q.dtype)
        keys, values = expand(entries, w_k, w_v)
        scores = (q[start:stop].transpose(0, 1).to(work) @ keys.to(work).mT) * scale
        hidden = torch.ones(count, context + count, dtype=torch.bool).triu(context + 1)
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        o = scores.softmax(-1) @ values.to(work)
        outputs.append(o.transpose(0, 1).flatten(1).to(q.dtype))
    out = torch.cat(outputs)
    return out if gate is None else out * gate


def expand(
    entries: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries [n, E] -> keys [H, n, K + E - L] and values [H, n, V]."""
    heads, _, rank = w_k.shape
    latent, rope = entries[:, :rank], entries[:, rank:]
    keys = torch.cat((latent @ w_k.mT, rope.expand(heads, -1, -1)), -1)
    return keys, latent @ w_v.mT
