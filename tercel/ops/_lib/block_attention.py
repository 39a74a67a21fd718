"""Attention of draft blocks over their context, without reading a length on the host; and what the
contracts of its ops draw and check alike."""

from typing import Any

import torch

from tercel.contract.contract import Cell, InputMaker
from tercel.errors import ContractError
from tercel.ops._lib.dtypes import wide
from tercel.ops._lib.pools import draw_pages

WORKSPACE = 1 << 22
"""Elements of gathered keys that requests share at a time."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    width: int,
    v_dim: int,
    scale: float,
    window: int | None,
    window_from_anchor: bool,
    causal: bool,
) -> torch.Tensor:
    """See op block_attention."""
    requests, columns = block_table.shape
    each = columns * k_cache[0].numel() + width * k[0].numel()
    block = max(1, WORKSPACE // max(1, each))
    seen = visible(
        context_lens,
        columns * k_cache.shape[1],
        width=width,
        window=window,
        window_from_anchor=window_from_anchor,
        causal=causal,
    )
    outputs = []
    for first in range(0, requests, block):
        rows, tokens = slice(first, first + block), slice(first * width, (first + block) * width)
        table, inside = block_table[rows], seen[rows].any(1)
        keys = _rows(k_cache, table, k[tokens], inside, width)
        values = keys[..., :v_dim]
        if v is not None and v_cache is not None:
            values = _rows(v_cache, table, v[tokens], inside, width)
        outputs.append(_mix(q[tokens], keys, values, seen[rows], scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def visible(
    context_lens: torch.Tensor,
    room: int,
    *,
    width: int,
    window: int | None,
    window_from_anchor: bool,
    causal: bool,
) -> torch.Tensor:
    """[R, width, room + width]: what each slot sees of the positions that the table has room for,
    and of its block."""
    device = context_lens.device
    key, slot = torch.arange(room, device=device), torch.arange(width, device=device)
    anchor = context_lens.view(-1, 1, 1)
    context = (key < anchor).expand(-1, width, -1)
    block = torch.ones(width, width, dtype=torch.bool, device=device)
    if causal:
        block = block.tril()
    if window is not None and window_from_anchor:
        context = context & (key >= anchor - window)
    elif window is not None:
        context = context & (anchor + slot.unsqueeze(1) - key < window)
        block = block & ((slot.unsqueeze(1) - slot).abs() < window)
    return torch.cat((context, block.expand(anchor.shape[0], -1, -1)), -1)


def _rows(
    cache: torch.Tensor,
    table: torch.Tensor,
    own: torch.Tensor,
    inside: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """[R, room + width, KV, D] wide: the cached rows, then the block's. What no slot sees is zero,
    as even NaN may be stored there."""
    cached = cache.index_select(0, table.flatten()).view(table.shape[0], -1, *cache.shape[2:])
    rows = torch.cat((cached, own.reshape(-1, width, *own.shape[1:])), 1)
    return wide(rows.masked_fill(~inside.view(*inside.shape, 1, 1), 0.0))


def _mix(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """[T, H * V] in the dtype of q; query heads share a KV head in runs."""
    requests, width = seen.shape[:2]
    kv_heads, group = keys.shape[2], q.shape[1] // keys.shape[2]
    rows = (wide(q) * scale).view(requests, width, kv_heads, group, -1).transpose(1, 2)
    scores = rows.flatten(2, 3) @ keys.permute(0, 2, 3, 1)
    hidden = ~seen.view(requests, 1, width, 1, -1)
    scores.view(requests, kv_heads, width, group, -1).masked_fill_(hidden, float("-inf"))
    mixed = (scores.softmax(-1) @ values.transpose(1, 2)).to(q.dtype)
    mixed = mixed.view(requests, kv_heads, width, group, -1).transpose(1, 2)
    return mixed.reshape(requests * width, -1)


def draw_context(cell: Cell, make: InputMaker) -> dict[str, Any]:
    """The caches of requests with contexts of so many tokens, poison everywhere else. Keys and
    values lie side by side, as context_kv stores them; with V in the cell there are keys only."""
    contexts, kv_heads, dim = cell["contexts"], cell["KV"], cell["D"]
    parts = 1 if "V" in cell.sizes else 2
    stored = make.normal(cell["PAGES"], cell["PS"], parts * kv_heads * dim)
    pages, table = draw_pages(make, contexts, stored)
    pool = pages.view(*pages.shape[:2], parts, kv_heads, dim)
    return {
        "k_cache": pool[:, :, 0],
        "v_cache": pool[:, :, 1] if parts == 2 else None,
        "block_table": table,
        "context_lens": torch.tensor(contexts, device=table.device),
    }


def check_context(
    k_cache: torch.Tensor, block_table: torch.Tensor, context_lens: torch.Tensor
) -> None:
    """Raises ContractError for a context that its block table does not hold."""
    room, longest = block_table.shape[1] * k_cache.shape[1], int(context_lens.max())
    if longest > room:
        raise ContractError(f"context_lens: {longest} tokens, the block table holds {room}")
    if int(block_table.max()) >= k_cache.shape[0]:
        raise ContractError(f"block_table: page {int(block_table.max())} of {k_cache.shape[0]}")
