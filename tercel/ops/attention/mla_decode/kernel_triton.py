"""attention/mla_decode: parts of every row's context, of which _lib/kernel_latent_merge makes one.

    attend_parts  s = scale * entry . query of a part's entries, mixed = softmax(s) . entries

The pages' bytes are what a call costs, so the first reads an entry once and uses it twice: as a key
and, its first L elements, as a value. A tile of entries lies in one page; query rows are the heads
of all of a row's tokens. How many parts a row may have follows from shapes alone; how many it has,
from its length on the device, and programs past those leave at once. Parts are merged in their
order, so bits repeat.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_latent_merge import FUSED_PARTS, Config
from tercel.ops._lib.kernel_latent_parts import (
    MOST_PARTS,
    PROGRAMS,
    SMALLEST,
    Context,
    decode,
    page_of,
    tiles_of,
)


def choose(context: Context) -> Config:
    """The configuration."""
    dtype, queries, page_size = context.query.dtype, context.queries, context.pages.shape[1]
    if dtype == torch.float32:  # for correctness: no tensor cores, twice the bytes
        tokens, columns, warps, stages, programs = 16, 16, 4, 1, PROGRAMS
    elif 32 < queries <= 64:
        tokens, columns, warps, stages, programs = 32, 64, 8, 4, PROGRAMS // 2
    else:
        columns = 16 if queries <= 16 else 32
        tokens, warps, stages, programs = 32, 4, 3, PROGRAMS
    tokens = math.gcd(tokens, page_size)
    tiles = triton.cdiv(context.capacity, tokens)
    least = 1 if tiles <= FUSED_PARTS else 2
    blocks = len(context.block_table) * triton.cdiv(queries, columns)
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
    context = Context(query, pages, block_table, context_lens, page_scale, width, scale)
    config = choose(context)
    return decode(attend_parts, context, w_v, gate, config)


@triton.jit(do_not_specialize=["queries", "heads", "width", "room"])
def attend_parts(
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
    first, last = tiles_of(length, part, parts, TOKENS, LEAST)
    if first >= last:
        return
    table = block_table + row * room
    page = page_of(table, first, last, TOKENS, PAGE)
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
        page = page_of(table, tile + 1, last, TOKENS, PAGE)
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
