"""attention/mla_decode for few query rows: the parts of kernel_triton.py with stated layouts.

    _attend_few    as attend_parts, for at most eight query rows

Entries stand on the left of both products, so that eight query rows are not padded. A tile of
entries is copied to shared memory once and read from there twice: along entries for the scores,
across them for the mixture, where FP8 codes widen on the way, in registers. Tiles that end before a
row's context hold entries of earlier steps, so that the first of them are on their way before the
wait for the previous launch, as is the length that says so; queries and the tile of this step's
own entries are asked for in L2. What does not fit is Triton's.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra import cuda

from tercel.ops._lib.kernel_bulk_prefetch import prefetch
from tercel.ops._lib.kernel_latent_merge import FUSED_PARTS, Config
from tercel.ops._lib.kernel_latent_parts import (
    MOST_PARTS,
    PROGRAMS,
    SMALLEST,
    Context,
    decode,
    fetch_tile,
    page_of,
    tiles_of,
)
from tercel.ops.attention.mla_decode import kernel_triton

COLUMNS = 8
"""Query rows of a program, and of a call."""
DEPTH = 128
"""Elements of an entry that one sum of scores runs over, besides the turned ones."""


def choose(context: Context, rank: int) -> Config | None:
    """The configuration; None: this is not for this kernel."""
    query, pages, (rows, room) = context.query, context.pages, context.block_table.shape
    page_size, turned = pages.shape[1], query.shape[2] - rank
    if (
        query.dtype == torch.float32
        or context.queries > COLUMNS
        or page_size % 32
        or rank % DEPTH
        or turned not in (32, 64, 128)
    ):
        return None
    # Few parts are merged sooner, so that one row is cut for one program a multiprocessor. Of
    # several rows it runs two, each with three tiles of 32 bf16 or 64 FP8 entries.
    codes, alone = pages.dtype != query.dtype, rows == 1
    tokens = 64 if (codes or alone) and page_size % 64 == 0 else 32
    tiles = triton.cdiv(room * page_size, tokens)
    programs = PROGRAMS // 2 if alone else PROGRAMS // rows
    if tiles <= 2 * FUSED_PARTS:
        programs = min(programs, FUSED_PARTS)
    parts = min(max(programs, 1), MOST_PARTS, tiles)
    stages = 4 if codes and alone else 3
    return Config(tokens, COLUMNS, tokens // 16, stages, parts, 1)


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
    config = choose(context, w_v.shape[2])
    if config is None:
        return kernel_triton.mla_decode(
            query, pages, block_table, context_lens, w_v, gate,
            width=width, scale=scale, page_scale=page_scale,
        )  # fmt: skip
    return decode(_attend_few, context, w_v, gate, config, DEPTH=DEPTH)


@gluon.constexpr_function
def _across_layout(tokens, warps):
    """[tokens, 32 * warps] codes: a lane has four neighbours of an entry, of the entries that a
    product wants of it."""
    k = tokens.bit_length() - 1
    registers = [[0, 1], [0, 2], [1, 0], [8, 0]] + [[1 << i, 0] for i in range(4, k)]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    across = [[0, 32 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [tokens, 32 * warps])


@gluon.jit
def _rows(pointer, DEPTH: gl.constexpr, LAYOUT: gl.constexpr):
    """[DEPTH, columns] from pointers to columns, straight into a product's operand."""
    lane = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(pointer[None, :] + lane[:, None])


@gluon.jit
def _wide(codes):
    """e4m3 as fp16, four of a word at a time."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; "
        "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r", [codes], gl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _wide_pairs(codes):
    """Of two words, those of neighbouring entries, the pairs of like bytes as fp16: what is named
    element 0, 1, .. 7 of them is element 0 of the first and the second word, then elements 1."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 x, y; .reg .b16 a, b, c, d; prmt.b32 x, $4, $5, 0x5140; "
        "prmt.b32 y, $4, $5, 0x7362; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; "
        "cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }",
        "=r,=r,=r,=r,r,r", [codes], gl.float16, is_pure=True, pack=8,
    )  # fmt: skip


@gluon.jit
def _entries(memory, at: gl.constexpr, DEPTH: gl.constexpr, act: gl.constexpr, LEFT: gl.constexpr):
    entries = memory.slice(at, DEPTH, 1).load(LEFT)
    return entries if memory.dtype == act else _wide(entries)


@gluon.jit
def _values(
    memory, at: gl.constexpr, act: gl.constexpr, LEFT: gl.constexpr, num_warps: gl.constexpr
):
    """[32 * num_warps, entries] of a tile, the left operand of a mixture; of codes, in the order
    of `_lane`."""
    TOKENS: gl.constexpr = memory.shape[0]
    part = memory.slice(at, 32 * num_warps, 1)
    if memory.dtype == act:
        return part.permute((1, 0)).load(LEFT)
    else:
        wide = _wide_pairs(part.load(_across_layout(TOKENS, num_warps)))
        # Named [entry / 2, entry % 2, warp, g, element / 2, element % 2]; are [entry / 2,
        # element / 2, warp, g, element % 2, entry % 2].
        wide = wide.reshape([TOKENS // 2, 2, num_warps, 8, 2, 2]).permute((1, 2, 4, 3, 0, 5))
        wide = wide.reshape([32 * num_warps, TOKENS])
        return gl.convert_layout(wide, LEFT, assert_trivial=True)


@gluon.jit
def _lane(row, CODES: gl.constexpr, num_warps: gl.constexpr):
    """The element of an entry that a row of `_values` is."""
    if CODES:
        warp = row // 16 % num_warps
        return warp * 32 + row % 8 * 4 + row // (16 * num_warps) * 2 + row // 8 % 2
    else:
        return row


@gluon.jit(do_not_specialize=["queries", "heads", "width", "room"])
def _attend_few(
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
    PAGE: gl.constexpr,
    L: gl.constexpr,
    D: gl.constexpr,
    TOKENS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    LEAST: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    E: gl.constexpr = L + D
    CODES: gl.constexpr = page_scale is not None
    stored: gl.constexpr = pages.dtype.element_ty
    act: gl.constexpr = gl.float16 if CODES else query.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    ALONG: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    QUERY: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    ACROSS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    SHARES: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    VECTOR: gl.constexpr = 128 // stored.primitive_bitwidth
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, 8, [1, 0])
    NARROW: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, 1, min(D // VECTOR, 8), [1, 0])
    PIECES: gl.constexpr = L // DEPTH
    BLOCK: gl.constexpr = 32 * num_warps
    BLOCKS: gl.constexpr = L // BLOCK

    part = gl.program_id(1)
    parts = gl.num_programs(1)
    row = gl.program_id(2).to(gl.int64)
    cuda.gdc_launch_dependents()
    context = gl.minimum(gl.load(context_lens + row), room * PAGE - width).to(gl.int32)
    length = context + width
    first, last = tiles_of(length, part, parts, TOKENS, LEAST)
    if first < last:
        table = block_table + row * room
        latents = gl.allocate_shared_memory(stored, [STAGES, TOKENS, L], SHARED)
        ropes = gl.allocate_shared_memory(stored, [STAGES, TOKENS, D], NARROW)
        ahead = gl.minimum(first + STAGES - 1, last)
        for step in range(STAGES - 1):
            tile = first + step
            page = page_of(table, tile, last, TOKENS, PAGE)
            if tile < last and (tile + 1) * TOKENS <= context:
                fetch_tile(
                    latents.index(step), ropes.index(step), pages, page, tile, length,
                    PAGE, L, D, num_warps,
                )  # fmt: skip
            async_copy.commit_group()
        # Tiles with entries of this step: of one page, or of two where the step begins a page.
        own = gl.maximum(context // TOKENS, first)
        own_page = page_of(table, own, last, TOKENS, PAGE)
        next_page = page_of(table, own + 1, last, TOKENS, PAGE)
        page = page_of(table, ahead, last, TOKENS, PAGE)
        BITS: gl.constexpr = query.dtype.element_ty.primitive_bitwidth
        for column in gl.static_range(COLUMNS):
            q = query + (row * queries + gl.minimum(column, queries - 1)) * E
            prefetch(q, column, E * BITS // 8)
        if own < ahead:
            entries = pages + own_page * (PAGE * E) + own * TOKENS % PAGE * E
            prefetch(entries, 0, TOKENS * E * stored.primitive_bitwidth // 8)
        cuda.gdc_wait()  # lengths, tables and earlier entries are a step's inputs
        n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, QUERY))
        q = query + (row * queries + gl.minimum(n, queries - 1)) * E
        turned = _rows(q + L, D, QUERY)
        straight = ()
        for piece in gl.static_range(PIECES):
            straight = straight + (_rows(q + piece * DEPTH, DEPTH, QUERY),)  # noqa: RUF005
        if own < ahead:
            for tile in range(own, ahead):
                fetch_tile(
                    latents.index(tile - first), ropes.index(tile - first), pages, own_page,
                    tile, length, PAGE, L, D, num_warps,
                )  # fmt: skip
                own_page = next_page
            async_copy.commit_group()
            async_copy.wait_group(0)

        n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
        seen = context + n // heads + 1
        scales = gl.full([COLUMNS], scale, gl.float32, gl.SliceLayout(0, SUMS))
        if CODES:
            by = gl.load(page_scale)
            scales = scales * by
            if query.dtype.element_ty == gl.bfloat16:
                # Codes widen to fp16 in one instruction; queries over the power of two below their
                # largest fit there, and lose nothing but what is 2 ** -17 of that.
                largest = gl.max(gl.abs(turned.to(gl.float32)), 0)
                for piece in gl.static_range(PIECES):
                    peak = gl.max(gl.abs(straight[piece].to(gl.float32)), 0)
                    largest = gl.maximum(largest, peak)
                power = gl.maximum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 1 << 23)
                inverse = ((254 << 23) - power).to(gl.float32, bitcast=True)[None, :]
                turned = (turned.to(gl.float32) * inverse).to(act)
                shrunk = ()
                for piece in gl.static_range(PIECES):
                    small = (straight[piece].to(gl.float32) * inverse).to(act)
                    shrunk = shrunk + (small,)  # noqa: RUF005
                straight = shrunk
                power = power.to(gl.float32, bitcast=True)
                scales = scales * gl.convert_layout(power, gl.SliceLayout(0, SUMS))

        most = gl.full([COLUMNS], SMALLEST, gl.float32, gl.SliceLayout(0, SUMS))
        total = gl.zeros([TOKENS, COLUMNS], gl.float32, SUMS)
        zeros = gl.zeros([TOKENS, COLUMNS], gl.float32, SUMS)
        mixes = ()
        for _ in gl.static_range(BLOCKS):
            mixes = mixes + (gl.zeros([BLOCK, COLUMNS], gl.float32, SUMS),)  # noqa: RUF005
        token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, SUMS))
        buffer = 0
        for tile in range(first, last):
            async_copy.wait_group(STAGES - 2)
            coming = tile + STAGES - 1
            if coming < last:
                free = buffer + STAGES - 1
                free = gl.where(free >= STAGES, free - STAGES, free)
                fetch_tile(
                    latents.index(free), ropes.index(free), pages, page, coming, length,
                    PAGE, L, D, num_warps,
                )  # fmt: skip
            async_copy.commit_group()
            page = page_of(table, coming + 1, last, TOKENS, PAGE)
            latent = latents.index(buffer)
            # Sums of their own, which need not wait for one another.
            scores = mma_v2(_entries(ropes.index(buffer), 0, D, act, ALONG), turned, zeros)
            others = zeros
            for piece in gl.static_range(PIECES):
                entries = _entries(latent, piece * DEPTH, DEPTH, act, ALONG)
                partial = mma_v2(entries, straight[piece], zeros)
                if piece % 2 == 0:
                    scores = scores + partial
                else:
                    others = others + partial
            position = (tile * TOKENS + token)[:, None]
            scores = (scores + others) * scales[None, :]
            scores = gl.where(position < seen[None, :], scores, float("-inf"))
            highest = gl.maximum(most, gl.max(scores, 0))
            p = gl.exp2(scores - highest[None, :])
            shrink = gl.exp2(most - highest)[None, :]
            total = total * shrink + p
            shares = gl.convert_layout(p.to(act), SHARES)
            mixing = ()
            for block in gl.static_range(BLOCKS):
                values = _values(latent, block * BLOCK, act, ACROSS, num_warps)
                mixing = mixing + (mma_v2(values, shares, mixes[block] * shrink),)  # noqa: RUF005
            mixes = mixing
            most = highest
            buffer = gl.where(buffer == STAGES - 1, 0, buffer + 1)

        whole = gl.sum(total, 0)
        share = 1.0 / gl.where(whole == 0, 1.0, whole)
        if CODES:
            share = share * by
        here = (row * parts + part) * queries + n
        gl.store(weight + here, most + gl.log2(whole), mask=n < queries)
        lane = _lane(gl.arange(0, BLOCK, layout=gl.SliceLayout(1, SUMS)), CODES, num_warps)
        for block in gl.static_range(BLOCKS):
            mix = mixes[block] * share[None, :]
            at = mixed + (here[None, :] * L + (block * BLOCK + lane)[:, None])
            gl.store(at, mix, mask=(n < queries)[None, :] & (lane >= 0)[:, None])
