"""attention/mla_decode: parts of every row's context, then their sum, then the values.

    _attend_parts  s = scale * entry . query of a part's entries, mixed = softmax(s) . entries
    _sum           u = act(a token's parts by their shares of the whole softmax)
    _values        out = act(act(w_v u) * gate); where parts are few, u too

The pages' bytes are what a call costs, so the first reads an entry once and uses it twice: as a key
and, its first L elements, as a value. A tile of entries lies in one page; query rows are the heads
of all of a row's tokens. How many parts a row may have follows from shapes alone; how many it has,
from its length on the device, and programs past those leave at once. Parts are merged in their
order, so bits repeat.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

PROGRAMS = 264
"""Programs of `_attend_parts` that fill a GPU of 132 multiprocessors twice. A constant: the number
of parts decides bits, which should not differ between GPUs."""
MOST_PARTS = 256
FUSED_PARTS = 32
"""Up to which one launch merges and multiplies, for a single token."""
SUMMED = 8192
"""Elements of parts that a program of `_sum` holds."""
LOG2_E = 1.4426950408889634
SMALLEST = tl.constexpr(-1e30)
"""Below every score, and finite: a row that sees nothing of a part has no NaN."""


class Config(NamedTuple):
    """How `_attend_parts` is cut into programs."""

    tokens: int
    """Entries per tile; a page holds whole tiles."""
    columns: int
    """Query rows per program."""
    warps: int
    stages: int
    """Tiles in flight."""
    parts: int
    """Most parts of a row."""
    least: int
    """Tiles that a part has at least."""


def choose(dtype: torch.dtype, rows: int, queries: int, capacity: int, page_size: int) -> Config:
    """The configuration for `rows` rows of `queries` query rows and `capacity` entries each."""
    if dtype == torch.float32:  # for correctness: no tensor cores, twice the bytes
        tokens, columns, warps, stages, programs = 16, 16, 4, 1, PROGRAMS
    elif 32 < queries <= 64:
        tokens, columns, warps, stages, programs = 32, 64, 8, 4, PROGRAMS // 2
    else:
        columns = 16 if queries <= 16 else 32
        tokens, warps, stages, programs = 32, 4, 3, PROGRAMS
    tokens = math.gcd(tokens, page_size)
    tiles = triton.cdiv(capacity, tokens)
    least = 1 if tiles <= FUSED_PARTS else 2
    blocks = rows * triton.cdiv(queries, columns)
    parts = min(max(programs // blocks, 1), MOST_PARTS, triton.cdiv(tiles, least))
    return Config(tokens, columns, warps, stages, parts, least)


def mla_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    width: int,
    scale: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, room = block_table.shape
    page_size = pages.shape[1]
    config = choose(query.dtype, rows, width * query.shape[1], room * page_size, page_size)
    parts = attend(
        query, pages, block_table, context_lens, page_scale, w_v.shape[2], width, scale, config
    )
    where = _Where(context_lens, width, room * page_size, config)
    return merge(*parts, where, w_v, gate, query.dtype, choose_merge(len(query), config.parts))


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    page_scale: torch.Tensor | None,
    rank: int,
    width: int,
    scale: float,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mixed [R, parts, width * H, L], weight [R, parts, width * H]), both fp32: what each part's
    softmax mixes, and the logarithm, of base two, of its sum."""
    rows, room = block_table.shape
    heads, entry = query.shape[1:]
    queries = width * heads
    mixed = query.new_empty(rows, config.parts, queries, rank, dtype=torch.float32)
    weight = query.new_empty(rows, config.parts, queries, dtype=torch.float32)
    grid = (triton.cdiv(queries, config.columns), config.parts, rows)
    _attend_parts[grid](
        query,
        pages,
        block_table,
        context_lens,
        page_scale,
        mixed,
        weight,
        queries,
        heads,
        width,
        room,
        scale * LOG2_E,
        PAGE=pages.shape[1],
        L=rank,
        D=entry - rank,
        TOKENS=config.tokens,
        COLUMNS=config.columns,
        LEAST=config.least,
        STAGES=config.stages,
        num_warps=config.warps,
        launch_pdl=True,
    )
    return mixed, weight


@triton.jit
def _live_parts(tiles, parts, LEAST: tl.constexpr):
    """How many of a row's parts have tiles."""
    return tl.minimum(parts, tl.cdiv(tiles, LEAST))


@triton.jit(do_not_specialize=["queries", "heads", "width", "room"])
def _attend_parts(
    query,  # [R, queries, L + D] act
    pages,  # [PAGES, PAGE, L + D] act or e4m3
    block_table,  # [R, room] i64
    context_lens,  # [R] i64
    page_scale,  # [1] f32, or None
    mixed,  # [R, parts, queries, L] f32
    weight,  # [R, parts, queries] f32
    queries,
    heads,
    width,
    room,
    scale,
    PAGE: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    E: tl.constexpr = L + D
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    cuda.gdc_launch_dependents()
    context = tl.minimum(tl.load(context_lens + row), room * PAGE - width).to(tl.int32)
    length = context + width
    tiles = tl.cdiv(length, TOKENS)
    live = _live_parts(tiles, parts, LEAST)
    if part >= live:
        return
    share = tiles // live
    more = tiles % live
    first = part * share + tl.minimum(part, more)
    last = first + share + (part < more).to(tl.int32)
    table = block_table + row * room
    page = tl.load(table + first * TOKENS // PAGE)
    cuda.gdc_wait()  # lengths and tables are a step's inputs, all else is the previous launch's

    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, L)[None, :]
    turned = tl.arange(0, D)[None, :]
    token = tl.arange(0, TOKENS)
    real = (n < queries)[:, None]
    q = query + (row * queries + n)[:, None] * E
    q_latent = tl.load(q + lanes, mask=real, other=0.0)
    q_rope = tl.load(q + L + turned, mask=real, other=0.0)
    seen = (context + n // heads + 1)[:, None]
    if page_scale is not None:
        scale *= tl.load(page_scale)
        if q_latent.dtype == tl.bfloat16:
            # Codes widen to fp16 in one instruction; queries over their largest fit there.
            largest = tl.max(tl.abs(q_latent.to(tl.float32)), 1)
            largest = tl.maximum(largest, tl.max(tl.abs(q_rope.to(tl.float32)), 1))
            largest = tl.where(largest > 0, largest, 1.0)[:, None]
            q_latent = (q_latent.to(tl.float32) / largest).to(tl.float16)
            q_rope = (q_rope.to(tl.float32) / largest).to(tl.float16)
            scale *= largest

    most = tl.full((COLUMNS,), SMALLEST, tl.float32)
    total = tl.zeros((COLUMNS, TOKENS), tl.float32)
    mix = tl.zeros((COLUMNS, L), tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        entry = pages + (page * PAGE + tile * TOKENS % PAGE + token)[:, None] * E
        page = tl.load(table + tl.minimum(tile + 1, last - 1) * TOKENS // PAGE)
        position = tile * TOKENS + token
        inside = (position < length)[:, None]
        latent = tl.load(entry + lanes, mask=inside, other=0.0)
        if page_scale is not None:
            # Widened in halves, which keeps the loads of both products one and in flight.
            low, high = tl.split(tl.reshape(latent, (TOKENS, L // 2, 2)))
            latent = tl.join(low.to(q_latent.dtype), high.to(q_latent.dtype))
            latent = tl.reshape(latent, (TOKENS, L))
        rope = tl.load(entry + L + turned, mask=inside, other=0.0).to(q_rope.dtype)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = tl.where(position[None, :] < seen, scores * scale, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(most - highest)[:, None]
        total = total * shrink + p
        mix = tl.dot(p.to(latent.dtype), latent, mix * shrink, input_precision="ieee")
        most = highest

    whole = tl.sum(total, 1)
    mix = mix / tl.where(whole == 0, 1.0, whole)[:, None]
    if page_scale is not None:
        mix = mix * tl.load(page_scale)
    here = (row * parts + part) * queries + n
    tl.store(weight + here, most + tl.log2(whole), mask=n < queries)
    tl.store(mixed + here[:, None] * L + lanes, mix, mask=real)


class Merge(NamedTuple):
    """How the parts of `_attend_parts` are merged and multiplied with w_v."""

    fused: bool
    """Whether each program of `_values` merges what it needs, or `_sum` has merged it."""
    tokens: int
    """Tokens per program of `_values`."""
    rows: int
    """Rows of w_v per program."""
    warps: int


def choose_merge(tokens: int, parts: int) -> Merge:
    """The configuration for `tokens` tokens of at most `parts` parts."""
    if tokens > 1:
        return Merge(False, 16, 32, 4)
    fused = parts <= FUSED_PARTS
    return Merge(fused, 1, 8 if fused else 16, 4)


class _Where(NamedTuple):
    """What says which parts a row has."""

    context_lens: torch.Tensor
    width: int
    capacity: int
    config: Config


def merge(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    where: _Where,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    dtype: torch.dtype,
    config: Merge,
) -> torch.Tensor:
    """The outputs [R * width, H * V] from what `attend` returns."""
    (heads, values, rank), width = w_v.shape, where.width
    tokens = mixed.shape[0] * width
    parts = mixed.shape[1]
    latent = mixed.new_empty(tokens, heads, rank, dtype=dtype)
    out = mixed.new_empty(tokens, heads * values, dtype=dtype)
    sizes = (tokens, heads, width, parts, where.capacity)
    every = max(triton.next_power_of_2(parts), 16)
    options = {
        "PARTS": every,
        "TOKENS": where.config.tokens,
        "LEAST": where.config.least,
        "L": rank,
        "launch_pdl": True,
    }
    if not config.fused:
        lanes = min(max(SUMMED // every, 16), 128, rank)
        grid = (rank // lanes, heads, tokens)
        _sum[grid](
            mixed, weight, where.context_lens, latent, *sizes, LANES=lanes, num_warps=4, **options
        )
    rows = min(config.rows, triton.next_power_of_2(values))
    grid = (triton.cdiv(values, rows), heads, triton.cdiv(tokens, config.tokens))
    _values[grid](
        mixed,
        weight,
        where.context_lens,
        latent,
        w_v,
        gate,
        out,
        *sizes,
        *w_v.stride(),
        0 if gate is None else gate.stride(0),
        V=values,
        ROWS=rows,
        BATCH=config.tokens,
        FUSED=config.fused,
        num_warps=config.warps,
        **options,
    )
    return out


@triton.jit
def _live(context_lens, token, width, parts, capacity, TOKENS: tl.constexpr, LEAST: tl.constexpr):
    """How many parts the row of a token has."""
    context = tl.minimum(tl.load(context_lens + token // width), capacity - width)
    return _live_parts(tl.cdiv(context.to(tl.int32) + width, TOKENS), parts, LEAST)


@triton.jit
def _mixture(
    mixed,  # [R, parts, queries, L] f32
    weight,  # [R, parts, queries] f32
    token,
    head,
    lanes,
    live,
    heads,
    width,
    parts,
    PARTS: tl.constexpr,
    L: tl.constexpr,
):
    """The mixed latents of a token's head, in fp32. All parts are read at once."""
    queries = width * heads
    part = tl.arange(0, PARTS)
    row = (token // width).to(tl.int64)
    here = (row * parts + part) * queries + token % width * heads + head
    inside = part < live
    logs = tl.load(weight + here, mask=inside, other=float("-inf"))
    rows = tl.load(mixed + here[:, None] * L + lanes[None, :], mask=inside[:, None], other=0.0)
    shares = tl.exp2(logs - tl.max(logs, 0))
    return tl.sum(rows * (shares / tl.sum(shares, 0))[:, None], 0)


@triton.jit(do_not_specialize=["tokens", "heads", "width", "parts", "capacity"])
def _sum(
    mixed,
    weight,
    context_lens,
    latent,  # [T, H, L] act
    tokens,
    heads,
    width,
    parts,
    capacity,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    L: tl.constexpr,
    LANES: tl.constexpr,
):
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    head = tl.program_id(1)
    token = tl.program_id(2)
    cuda.gdc_launch_dependents()
    live = _live(context_lens, token, width, parts, capacity, TOKENS, LEAST)
    cuda.gdc_wait()
    mix = _mixture(mixed, weight, token, head, lanes, live, heads, width, parts, PARTS, L)
    here = latent + (token.to(tl.int64) * heads + head) * L + lanes
    tl.store(here, mix.to(latent.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens", "heads", "width", "parts", "capacity"])
def _values(
    mixed,
    weight,
    context_lens,
    latent,  # [T, H, L] act
    w_v,  # [H, V, L] act, strided
    gate,  # [T, H * V] act, rows gate_stride apart, or None
    out,  # [T, H * V] act
    tokens,
    heads,
    width,
    parts,
    capacity,
    head_stride,
    value_stride,
    lane_stride,
    gate_stride,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    L: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    FUSED: tl.constexpr,
):
    value = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    token = tl.program_id(2) * BATCH + tl.arange(0, BATCH)
    lanes = tl.arange(0, L)
    cuda.gdc_launch_dependents()
    here = w_v + head.to(tl.int64) * head_stride + value[:, None] * value_stride
    w = tl.load(here + lanes[None, :] * lane_stride, mask=(value < V)[:, None], other=0.0)
    real = (token < tokens)[:, None] & (value < V)[None, :]
    column = head * V + value
    one = tl.program_id(2)
    live = _live(context_lens, one, width, parts, capacity, TOKENS, LEAST) if FUSED else 0
    cuda.gdc_wait()  # w_v is a constant and lengths are a step's inputs; the rest is earlier work's
    if gate is not None:
        at = gate + token.to(tl.int64)[:, None] * gate_stride + column[None, :]
        by = tl.load(at, mask=real, other=0.0)
    if FUSED:
        mix = _mixture(mixed, weight, one, head, lanes, live, heads, width, parts, PARTS, L)
        mix = mix[None, :].to(w.dtype)
    else:
        there = latent + (token.to(tl.int64) * heads + head)[:, None] * L + lanes[None, :]
        mix = tl.load(there, mask=(token < tokens)[:, None], other=0.0)  # [BATCH, L]
    if BATCH == 1:
        o = tl.sum(w.to(tl.float32) * mix.to(tl.float32), 1)[None, :]
    else:
        o = tl.dot(mix, tl.trans(w), input_precision="ieee")
    o = o.to(w.dtype)
    if gate is not None:
        o = (o.to(tl.float32) * by.to(tl.float32)).to(w.dtype)
    tl.store(out + token.to(tl.int64)[:, None] * (heads * V) + column[None, :], o, mask=real)
