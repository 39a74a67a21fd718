"""Draft blocks over their context and themselves: what both ops of block attention launch.

    _attend   a part of a request's context for one KV head and up to 64 query rows; the first part
              takes the block's own keys too. With one part it writes the output.
    _merge    the parts' mixtures by their shares of the whole softmax

Query rows are a KV head's query heads of every slot. How many parts a request may have follows from
shapes alone, how many it has from its length on the device; parts are merged in their order, so
bits repeat. Lengths are what acceptance has just decided, so nothing is read before the wait but
weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_rotary import norm_rotate

PROGRAMS = 264
"""That fill a GPU, two on each SM: a tile waits for its page, then for its keys and values. A
constant: the number of parts decides bits."""
MOST_PARTS = 128
ROWS = 64
TOKENS = 64
"""Context tokens per tile."""
LEAST = 1
"""Tiles that a part has at least."""
LANES = 64
"""Channels per program of `_merge`."""
LOG2_E = 1.4426950408889634
SMALLEST = tl.constexpr(-1e30)
"""Below every score, and finite: a row that sees nothing of a part has no NaN."""


class Seen(NamedTuple):
    """What a slot sees; see op block_attention."""

    window: int | None
    window_from_anchor: bool
    causal: bool


class Turn(NamedTuple):
    """Norms and rotation of queries and of the block's keys."""

    q_norm: torch.Tensor
    k_norm: torch.Tensor
    inv_freq: torch.Tensor
    eps: float
    rope_scale: float
    interleaved: bool


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
    seen: Seen,
    turn: Turn | None = None,
) -> torch.Tensor:
    """See op block_attention. With `turn` q and k are normed, turned and rounded first. Channels of
    values are a power of two, as are those that keys have beyond them."""
    tokens, heads, dim = q.shape
    kv_heads, (requests, columns) = k.shape[1], block_table.shape
    queries, room = width * (heads // kv_heads), columns * k_cache.shape[1]
    rows = max(min(triton.next_power_of_2(queries), ROWS), 16)
    blocks = triton.cdiv(queries, rows)
    tiles = triton.cdiv(room, TOKENS)
    parts = max(PROGRAMS // max(requests * kv_heads * blocks, 1), 1)
    parts = min(parts, MOST_PARTS, max(triton.cdiv(tiles, LEAST), 1))
    out = q.new_empty(tokens, heads * v_dim)
    mixed, weight = out, None
    if parts > 1:
        mixed = q.new_empty(parts, tokens, heads, v_dim, dtype=torch.float32)
        weight = q.new_empty(parts, tokens, heads, dtype=torch.float32)
    _attend[(parts * blocks, kv_heads, requests)](
        q,
        k,
        v,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        *(turn[:3] if turn else (None, None, None)),
        mixed,
        weight,
        tokens,
        heads,
        columns,
        parts,
        width,
        seen.window or 0,
        *q.stride()[:2],
        *k.stride()[:2],
        *((0, 0) if v is None else v.stride()[:2]),
        *k_cache.stride()[:3],
        *((0, 0, 0) if v_cache is None else v_cache.stride()[:3]),
        scale * LOG2_E,
        turn.eps if turn else 0.0,
        turn.rope_scale if turn else 1.0,
        SLOTS=max(triton.next_power_of_2(width), 16),
        GROUP=heads // kv_heads,
        PAGE=k_cache.shape[1],
        V=v_dim,
        REST=dim - v_dim,
        ROWS=rows,
        TOKENS=TOKENS,
        LEAST=LEAST,
        WINDOWED=seen.window is not None,
        ANCHORED=seen.window_from_anchor,
        CAUSAL=seen.causal,
        INTERLEAVED=bool(turn and turn.interleaved),
        num_warps=8 if rows * v_dim >= 64 * 128 else 4,
        num_stages=2,
        launch_pdl=True,
    )
    if weight is not None:
        lanes = min(v_dim, LANES)
        _merge[(tokens, heads, v_dim // lanes)](
            mixed,
            weight,
            context_lens,
            out,
            tokens,
            heads,
            parts,
            room,
            width,
            seen.window or 0,
            PARTS=triton.next_power_of_2(parts),
            V=v_dim,
            LANES=lanes,
            TOKENS=TOKENS,
            LEAST=LEAST,
            num_warps=4 if parts > 64 else 2,
            launch_pdl=True,
        )
    return out


@triton.jit
def _tiles(context_lens, request, room, window, TOKENS: tl.constexpr):
    """(length, first tile that any slot sees, one past the last)."""
    length = tl.minimum(tl.load(context_lens + request), room).to(tl.int32)
    first = tl.where(window > 0, tl.maximum(length - window, 0) // TOKENS, 0)
    return length, first, tl.cdiv(length, TOKENS)


@triton.jit
def _live_parts(tiles, parts, LEAST: tl.constexpr):
    return tl.maximum(tl.minimum(parts, tl.cdiv(tiles, LEAST)), 1)


@triton.jit
def _update(scores, hidden, value, most, total, mix):
    """The running softmax after one more tile."""
    scores = tl.where(hidden, float("-inf"), scores)
    highest = tl.maximum(most, tl.max(scores, 1))
    p = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(most - highest)
    total = total * shrink + tl.sum(p, 1)
    mix = tl.dot(p.to(value.dtype), value, mix * shrink[:, None], input_precision="ieee")
    return highest, total, mix


@triton.jit(do_not_specialize=["tokens", "heads", "columns", "parts", "width", "window"])
def _attend(
    q,  # [tokens, heads, V + REST] act
    k,  # [tokens, KV, V + REST] act
    v,  # [tokens, KV, V] act; None: the first V channels of k
    k_cache,  # [PAGES, PAGE, KV, V + REST] act
    v_cache,  # [PAGES, PAGE, KV, V] act; None with v
    block_table,  # [R, columns] i64
    context_lens,  # [R] i64
    q_norm,  # [V] act; None: q and k are normed and turned
    k_norm,  # [V] act
    inv_freq,  # [V / 2] f32
    out,  # [tokens, heads, V] act, or with several parts [parts, tokens, heads, V] f32
    weight,  # [parts, tokens, heads] f32, or None
    tokens,
    heads,
    columns,
    parts,
    width,
    window,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    k_slot,
    k_cache_head,
    v_page,
    v_slot,
    v_cache_head,
    scale,
    eps,
    rope_scale,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    V: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOWED: tl.constexpr,
    ANCHORED: tl.constexpr,
    CAUSAL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    part = tl.program_id(0) % parts
    row = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)
    kv = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, V)[None, :]
    slot = row // GROUP
    head = kv * GROUP + row % GROUP
    real = row < width * GROUP
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    length, first, last = _tiles(context_lens, request, columns * PAGE, window, TOKENS)
    live = _live_parts(last - first, parts, LEAST)
    if part >= live:
        return

    token = request * width + slot
    at = q + token[:, None] * q_token + head[:, None] * q_head
    query = tl.load(at + d, mask=real[:, None], other=0.0)
    own = tl.arange(0, SLOTS)
    inside = (own < width)[:, None]
    its = k + (request * width + own)[:, None] * k_token + kv * k_head
    key = tl.load(its + d, mask=inside, other=0.0)
    if q_norm is not None:
        frequency = tl.load(inv_freq + tl.arange(0, V // 2))
        of_q = tl.load(q_norm + d)
        of_k = tl.load(k_norm + d)
        start = tl.load(context_lens + request)
        query = norm_rotate(
            query, of_q, frequency, start + slot, eps, rope_scale, ROWS, V, INTERLEAVED
        ).to(query.dtype)
        key = norm_rotate(
            key, of_k, frequency, start + own, eps, rope_scale, SLOTS, V, INTERLEAVED
        ).to(query.dtype)
    if REST > 0:
        e = V + tl.arange(0, REST)[None, :]
        query_rest = tl.load(at + e, mask=real[:, None], other=0.0)
        key_rest = tl.load(its + e, mask=inside, other=0.0)

    most = tl.full((ROWS,), SMALLEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, V), tl.float32)
    if part == 0:
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if REST > 0:
            scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision="ieee")
        distance = slot[:, None] - own[None, :]
        hidden = tl.broadcast_to((own >= width)[None, :], (ROWS, SLOTS))
        if CAUSAL:
            hidden = hidden | (distance < 0)
        if WINDOWED and not ANCHORED:
            hidden = hidden | (tl.abs(distance) >= window)
        value = key
        if v is not None:
            theirs = v + (request * width + own)[:, None] * v_token + kv * v_head
            value = tl.load(theirs + d, mask=inside, other=0.0)
        most, total, mix = _update(scores * scale, hidden, value, most, total, mix)

    share = (last - first) // live
    more = (last - first) % live
    begin = first + part * share + tl.minimum(part, more)
    end = begin + share + (part < more).to(tl.int32)
    for tile in tl.range(begin, end):
        j = tile * TOKENS + tl.arange(0, TOKENS)
        held = j < length
        page = tl.load(block_table + request * columns + j // PAGE, mask=held, other=0)
        place = (page * k_page + j % PAGE * k_slot)[:, None] + kv * k_cache_head
        cached = tl.load(k_cache + place + d, mask=held[:, None], other=0.0)
        tile_scores = tl.dot(query, tl.trans(cached), input_precision="ieee")
        if REST > 0:
            cached_rest = tl.load(k_cache + place + e, mask=held[:, None], other=0.0)
            tile_scores = tl.dot(
                query_rest, tl.trans(cached_rest), tile_scores, input_precision="ieee"
            )
        unseen = tl.broadcast_to((j >= length)[None, :], (ROWS, TOKENS))
        if WINDOWED and ANCHORED:
            unseen = unseen | (j < length - window)[None, :]
        elif WINDOWED:
            unseen = unseen | (length + slot[:, None] - j[None, :] >= window)
        kept = cached
        if v_cache is not None:
            place = (page * v_page + j % PAGE * v_slot)[:, None] + kv * v_cache_head
            kept = tl.load(v_cache + place + d, mask=held[:, None], other=0.0)
        most, total, mix = _update(tile_scores * scale, unseen, kept, most, total, mix)

    mix = mix / tl.where(total == 0, 1.0, total)[:, None]
    here = (part.to(tl.int64) * tokens + token) * heads + head
    if weight is not None:
        tl.store(weight + here, most + tl.log2(total), mask=real)
    tl.store(out + here[:, None] * V + d, mix.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["tokens", "heads", "parts", "room", "width", "window"])
def _merge(
    mixed,  # [parts, tokens, heads, V] f32
    weight,  # [parts, tokens, heads] f32
    context_lens,  # [R] i64
    out,  # [tokens, heads * V] act
    tokens,
    heads,
    parts,
    room,
    width,
    window,
    PARTS: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, PARTS)
    d = tl.program_id(2) * LANES + tl.arange(0, LANES)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    _, first, last = _tiles(context_lens, token // width, room, window, TOKENS)
    inside = part < _live_parts(last - first, parts, LEAST)
    here = (part * tokens + token) * heads + head
    logs = tl.load(weight + here, mask=inside, other=float("-inf"))
    rows = tl.load(mixed + here[:, None] * V + d[None, :], mask=inside[:, None], other=0.0)
    shares = tl.exp2(logs - tl.max(logs, 0))
    mix = tl.sum(rows * (shares / tl.sum(shares, 0))[:, None], 0)
    at = out + (token * heads + head) * V + d
    tl.store(at, mix.to(out.dtype.element_ty))
