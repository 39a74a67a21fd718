"""Draft blocks over their context and themselves: what both ops of block attention launch.

    _attend   a part of a request's context for one KV head and up to 64 query rows, or the block's
              own keys. Where contexts are not divided one program takes both, and writes the output
    _merge    the parts' mixtures by their shares of the whole softmax

Query rows are a KV head's query heads of every slot. How many parts a request may have follows from
shapes alone, how many it has from its length on the device; parts are merged in their order, so
bits repeat. What a call waits for is memory, one read after the other, so all but queries is done
before the grid-dependency wait: lengths and tables are a step's inputs by then, angles follow from
them, and the first rows of the cache are on their way to L2, which is not a read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_prefetch import prefetch_lines
from tercel.ops._lib.kernel_rotary import norm_turn, turns

ROWS, MOST_HEADS = 64, 32
"""Query rows of a program at most, and the heads of a slot among them."""
PROGRAMS = 264
"""That fill a GPU, two on each SM. A constant: the number of parts decides bits."""
MANY = 31
"""Parts, from which on one has at least two tiles: their sums have to be read again."""
MOST_PARTS = 255
LANES = 32
"""Channels per program of `_merge`."""
LOG2_E = 1.4426950408889634
SMALLEST = tl.constexpr(-1e30)
"""Below every score, and finite: a row that sees nothing of a part has no NaN."""


class Config(NamedTuple):
    """How `_attend` is cut into programs."""

    tokens: int
    """Of the context, per tile."""
    parts: int
    """Of a request's context; 1: it is not divided."""
    warps: int
    stages: int
    """Tiles in flight."""


def choose(v_dim: int, element_size: int, programs: int, room: int) -> Config:
    """For `programs` programs if contexts of at most `room` tokens are not divided. By measurement
    on an H200 (docs/log.md, 2026-12-01)."""
    wide = v_dim > 256
    tokens = 32 if wide else max(min((1 << 14) // (v_dim * element_size), 64), 16)
    tiles = triton.cdiv(room, tokens)
    most = tiles if tiles < MANY else max(tiles // 2 - 1, MANY)
    parts = max(min(triton.cdiv(PROGRAMS, programs), MOST_PARTS, most), 1)
    return Config(tokens, parts, 8 if v_dim > 64 else 4, 2 if wide else 3)


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
    group, room = heads // kv_heads, columns * k_cache.shape[1]
    its_heads = min(triton.next_power_of_2(group), MOST_HEADS)
    slots = max(min(triton.next_power_of_2(width), ROWS // its_heads), 16 // its_heads)
    slot_blocks = triton.cdiv(width, slots)
    blocks = slot_blocks * triton.cdiv(group, its_heads)
    config = choose(v_dim, q.element_size(), max(requests * kv_heads * blocks, 1), room)
    members = config.parts + 1 if config.parts > 1 else 1
    out = q.new_empty(tokens, heads * v_dim)
    mixed, weight = out, None
    if members > 1:
        mixed = q.new_empty(members, tokens, heads, v_dim, dtype=torch.float32)
        weight = q.new_empty(members, tokens, heads, dtype=torch.float32)
    _attend[(members * blocks, kv_heads, requests)](
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
        members,
        slot_blocks,
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
        SLOTS=slots,
        HEADS=its_heads,
        OWN=max(triton.next_power_of_2(width), 16),
        GROUP=group,
        PAGE=k_cache.shape[1],
        V=v_dim,
        REST=dim - v_dim,
        TOKENS=config.tokens,
        STAGES=config.stages,
        WINDOWED=seen.window is not None,
        ANCHORED=seen.window_from_anchor,
        CAUSAL=seen.causal,
        INTERLEAVED=bool(turn and turn.interleaved),
        num_warps=config.warps,
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
            members,
            room,
            width,
            seen.window or 0,
            MEMBERS=triton.next_power_of_2(members),
            V=v_dim,
            LANES=lanes,
            TOKENS=config.tokens,
            num_warps=2,
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
def _page(table, first, columns, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """The page of a tile's tokens from `first` on, or of each where a tile crosses pages."""
    if PAGE % TOKENS == 0:
        return tl.load(table + tl.minimum(first // PAGE, columns - 1))
    else:
        token = first + tl.arange(0, TOKENS)
        return tl.load(table + tl.minimum(token // PAGE, columns - 1))


@triton.jit
def _rows(cache, page, first, of_page, of_slot, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """[TOKENS, 1] where a tile's rows lie in `cache`."""
    token = tl.arange(0, TOKENS)
    if PAGE % TOKENS == 0:
        return cache + page * of_page + ((first % PAGE + token) * of_slot)[:, None]
    else:
        return cache + (page * of_page + (first + token) % PAGE * of_slot)[:, None]


@triton.jit
def _update(scores, hidden, scale, value, most, total, mix):
    """The running softmax after one more tile, whose scores are not scaled yet."""
    scores = tl.where(hidden, float("-inf"), scores)
    highest = tl.maximum(most, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - highest[:, None])
    shrink = tl.exp2(most - highest)
    total = total * shrink + tl.sum(p, 1)
    mix = tl.dot(p.to(value.dtype), value, mix * shrink[:, None], input_precision="ieee")
    return highest, total, mix


@triton.jit
def _per_row(x, HEADS: tl.constexpr):
    """x [SLOTS, n] for each of a slot's heads: [SLOTS * HEADS, n]."""
    SLOTS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], (SLOTS, HEADS, N)), (SLOTS * HEADS, N))


@triton.jit(
    do_not_specialize=["tokens", "heads", "columns", "members", "slot_blocks", "width", "window"]
)
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
    out,  # [tokens, heads, V] act, or with several members [members, tokens, heads, V] f32
    weight,  # [members, tokens, heads] f32, or None: one member
    tokens,
    heads,
    columns,
    members,
    slot_blocks,
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
    HEADS: tl.constexpr,
    OWN: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    V: tl.constexpr,
    REST: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    ANCHORED: tl.constexpr,
    CAUSAL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    ROWS: tl.constexpr = SLOTS * HEADS
    member = tl.program_id(0) % members
    block = tl.program_id(0) // members
    kv = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, V)[None, :]
    first_slot = block % slot_blocks * SLOTS
    row = tl.arange(0, ROWS)
    slot = first_slot + row // HEADS
    its = block // slot_blocks * HEADS + row % HEADS
    head = kv * GROUP + its
    real = (slot < width) & (its < GROUP)
    cuda.gdc_launch_dependents()
    length, first, last = _tiles(context_lens, request, columns * PAGE, window, TOKENS)
    # Member 0 has the block's own keys, and all of the context where there are no others.
    if weight is None:
        begin = first
        end = last
    else:
        live = tl.minimum(members - 1, last - first)
        if member > live:
            return
        part = member - 1
        share = (last - first) // tl.maximum(live, 1)
        more = (last - first) % tl.maximum(live, 1)
        begin = first + part * share + tl.minimum(part, more)
        end = begin + share + (part < more).to(tl.int32)
        if member == 0:
            begin = last
            end = last
    token = tl.arange(0, TOKENS)
    table = block_table + request * columns
    page = _page(table, begin * TOKENS, columns, PAGE, TOKENS)
    keys = k_cache + kv.to(tl.int64) * k_cache_head
    if v_cache is not None:
        values = v_cache + kv.to(tl.int64) * v_cache_head
    line = tl.arange(0, max(V // 64, 1))[None, :] * min(V, 64)
    prefetch_lines(_rows(keys, page, begin * TOKENS, k_page, k_slot, PAGE, TOKENS) + line)
    if v_cache is not None:
        prefetch_lines(_rows(values, page, begin * TOKENS, v_page, v_slot, PAGE, TOKENS) + line)
    if q_norm is not None:
        frequency = tl.load(inv_freq + tl.arange(0, V // 2))
        of_q = tl.load(q_norm + d)
        cos, sin = turns(frequency, length + first_slot + tl.arange(0, SLOTS), rope_scale)
    cuda.gdc_wait()

    at = q + (request * width + slot)[:, None] * q_token + head[:, None] * q_head
    query = tl.load(at + d, mask=real[:, None], other=0.0)
    if q_norm is not None:
        cos, sin = _per_row(cos, HEADS), _per_row(sin, HEADS)
        query = norm_turn(query, of_q, cos, sin, eps, ROWS, V, INTERLEAVED).to(query.dtype)
    if REST > 0:
        e = V + tl.arange(0, REST)[None, :]
        query_rest = tl.load(at + e, mask=real[:, None], other=0.0)

    most = tl.full((ROWS,), SMALLEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, V), tl.float32)
    if member == 0:
        own = tl.arange(0, OWN)
        inside = (own < width)[:, None]
        theirs = k + (request * width + own)[:, None] * k_token + kv * k_head
        key = tl.load(theirs + d, mask=inside, other=0.0)
        if q_norm is not None:
            of_k = tl.load(k_norm + d)
            own_cos, own_sin = turns(frequency, length + own, rope_scale)
            key = norm_turn(key, of_k, own_cos, own_sin, eps, OWN, V, INTERLEAVED).to(key.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if REST > 0:
            key_rest = tl.load(theirs + e, mask=inside, other=0.0)
            scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision="ieee")
        distance = slot[:, None] - own[None, :]
        hidden = tl.broadcast_to((own >= width)[None, :], (ROWS, OWN))
        if CAUSAL:
            hidden = hidden | (distance < 0)
        if WINDOWED and not ANCHORED:
            hidden = hidden | (tl.abs(distance) >= window)
        value = key
        if v is not None:
            theirs = v + (request * width + own)[:, None] * v_token + kv * v_head
            value = tl.load(theirs + d, mask=inside, other=0.0)
        most, total, mix = _update(scores, hidden, scale, value, most, total, mix)

    for tile in tl.range(begin, end, num_stages=STAGES):
        j = tile * TOKENS + token
        held = (j < length)[:, None]
        place = _rows(keys, page, tile * TOKENS, k_page, k_slot, PAGE, TOKENS)
        cached = tl.load(place + d, mask=held, other=0.0)
        kept = cached
        if v_cache is not None:
            there = _rows(values, page, tile * TOKENS, v_page, v_slot, PAGE, TOKENS)
            kept = tl.load(there + d, mask=held, other=0.0)
        page = _page(table, (tile + 1) * TOKENS, columns, PAGE, TOKENS)
        tile_scores = tl.dot(query, tl.trans(cached), input_precision="ieee")
        if REST > 0:
            cached_rest = tl.load(place + e, mask=held, other=0.0)
            tile_scores = tl.dot(
                query_rest, tl.trans(cached_rest), tile_scores, input_precision="ieee"
            )
        unseen = tl.broadcast_to((j >= length)[None, :], (ROWS, TOKENS))
        if WINDOWED and ANCHORED:
            unseen = unseen | (j < length - window)[None, :]
        elif WINDOWED:
            unseen = unseen | (length + slot[:, None] - j[None, :] >= window)
        most, total, mix = _update(tile_scores, unseen, scale, kept, most, total, mix)

    mix = mix / tl.where(total == 0, 1.0, total)[:, None]
    here = (member.to(tl.int64) * tokens + request * width + slot) * heads + head
    if weight is not None:
        tl.store(weight + here, most + tl.log2(tl.where(total > 0.0, total, 1.0)), mask=real)
    tl.store(out + here[:, None] * V + d, mix.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["tokens", "heads", "members", "room", "width", "window"])
def _merge(
    mixed,  # [members, tokens, heads, V] f32
    weight,  # [members, tokens, heads] f32
    context_lens,  # [R] i64
    out,  # [tokens, heads * V] act
    tokens,
    heads,
    members,
    room,
    width,
    window,
    MEMBERS: tl.constexpr,
    V: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    member = tl.arange(0, MEMBERS)
    d = tl.program_id(2) * LANES + tl.arange(0, LANES)
    cuda.gdc_launch_dependents()
    _, first, last = _tiles(context_lens, token // width, room, window, TOKENS)
    inside = member <= tl.minimum(members - 1, last - first)
    here = (member * tokens + token) * heads + head
    cuda.gdc_wait()
    logs = tl.load(weight + here, mask=inside, other=float("-inf"))
    rows = tl.load(mixed + here[:, None] * V + d[None, :], mask=inside[:, None], other=0.0)
    shares = tl.exp2(logs - tl.max(logs, 0))
    mix = tl.sum(rows * (shares / tl.sum(shares, 0))[:, None], 0)
    at = out + (token * heads + head) * V + d
    tl.store(at, mix.to(out.dtype.element_ty))
