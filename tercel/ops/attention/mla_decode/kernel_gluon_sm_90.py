"""attention/mla_decode for many query rows: the parts of kernel_triton.py on warpgroup products.

    attend_many   as attend_parts, for 64 query rows a program

Both products read a tile of entries from shared memory, where it is copied once: rows of entries
for the scores, columns for the mixture. Two warpgroups share them: each has half of a tile's
entries in the scores, half of an entry's elements in the mixture, and what a softmax gives passes
between them through shared memory. The next tile is asked for before this one is waited for; the
first, where it holds entries of earlier steps alone, before the wait for the previous launch.
What does not fit is kernel_gluon.py's.

The interpreter does not run it: the CPU tests cover kernel_triton.py alone.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra import cuda

from tercel.ops._lib.kernel_latent_merge import FUSED_PARTS, Config
from tercel.ops._lib.kernel_latent_parts import (
    MOST_PARTS,
    PROGRAMS,
    SMALLEST,
    Context,
    decode,
    fetch,
    fetch_tile,
    page_of,
    tiles_of,
)
from tercel.ops.attention.mla_decode import kernel_gluon

# Triton 3.9 has renamed it.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

FEWEST = 33
"""Query rows from which on products of 64 are worth their padding."""
ROWS = 64
"""Query rows of a program, and entries of a tile."""
BUFFERS = 2


def choose(context: Context, rank: int) -> Config | None:
    """The configuration; None: this is not for this kernel."""
    query, pages = context.query, context.pages
    rows, turned = len(context.block_table), query.shape[2] - rank
    if (
        query.dtype == torch.float32
        or pages.dtype != query.dtype
        or context.queries < FEWEST
        or pages.shape[1] % ROWS
        or (rank, turned) != (512, 64)
    ):
        return None
    blocks = rows * triton.cdiv(context.queries, ROWS)
    tiles = context.capacity // ROWS
    least = 1 if tiles <= FUSED_PARTS else 2
    parts = min(max(PROGRAMS // 2 // blocks, 1), MOST_PARTS, triton.cdiv(tiles, least))
    return Config(ROWS, ROWS, 8, BUFFERS, parts, least)


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
        return kernel_gluon.mla_decode(
            query, pages, block_table, context_lens, w_v, gate,
            width=width, scale=scale, page_scale=page_scale,
        )  # fmt: skip
    return decode(attend_many, context, w_v, gate, config)


@gluon.constexpr_function
def _sums_layout(columns, warps):
    """Of sums [64, columns]: each warpgroup has a part of the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, columns * 4 // warps, 16])


@gluon.jit
def _folded(p):
    """Sums [64, 2, 4] of what threads have of rows p [64, columns]: few registers for long."""
    parts = p.reshape([p.shape[0], 2, p.shape[1] // 16, 4, 2])
    return gl.sum(gl.sum(parts, 4), 2)


@gluon.jit(do_not_specialize=["queries", "heads", "width", "room"])
def attend_many(
    query,  # [R, queries, L + D] act
    pages,  # [PAGES, PAGE, L + D] act
    block_table,  # [R, room] i64
    context_lens,  # [R] i64
    page_scale,  # None
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
    LEAST: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    act: gl.constexpr = query.dtype.element_ty
    SCORES: gl.constexpr = _sums_layout(TOKENS, num_warps)
    MIXED: gl.constexpr = _sums_layout(L, num_warps)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    part = gl.program_id(1)
    parts = gl.num_programs(1)
    row = gl.program_id(2).to(gl.int64)
    cuda.gdc_launch_dependents()
    context = gl.minimum(gl.load(context_lens + row), room * PAGE - width).to(gl.int32)
    length = context + width
    first, last = tiles_of(length, part, parts, TOKENS, LEAST)
    if first < last:
        table = block_table + row * room
        latents = gl.allocate_shared_memory(act, [STAGES, TOKENS, L], SHARED)
        ropes = gl.allocate_shared_memory(act, [STAGES, TOKENS, D], SHARED)
        q_latent = gl.allocate_shared_memory(act, [COLUMNS, L], SHARED)
        q_rope = gl.allocate_shared_memory(act, [COLUMNS, D], SHARED)
        shares = gl.allocate_shared_memory(act, [COLUMNS, TOKENS], SHARED)
        page = page_of(table, first, last, TOKENS, PAGE)
        is_early = (first + 1) * TOKENS <= context
        if is_early:
            fetch_tile(
                latents.index(0), ropes.index(0), pages, page, first, length, PAGE, L, D, num_warps
            )
        cuda.gdc_wait()  # lengths, tables and earlier entries are a step's inputs
        block = gl.program_id(0) * COLUMNS
        base = query + (row * queries + block) * (L + D)
        fetch(q_latent, q_rope, base, queries - block, L, D, num_warps)
        if not is_early:
            fetch_tile(
                latents.index(0), ropes.index(0), pages, page, first, length, PAGE, L, D, num_warps
            )
        async_copy.commit_group()
        page = page_of(table, first + 1, last, TOKENS, PAGE)

        n = block + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, SCORES))
        seen = (context + n // heads + 1)[:, None]
        token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, SCORES))[None, :]
        most = gl.full([COLUMNS], SMALLEST, gl.float32, gl.SliceLayout(1, SCORES))
        zeros = gl.zeros([COLUMNS, TOKENS], gl.float32, SCORES)
        total = _folded(zeros)
        OF_TOTAL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout))
        flying = hopper.warpgroup_mma_init(gl.zeros([COLUMNS, L], gl.float32, MIXED))
        for tile in range(first, last):
            buffer = (tile - first) % STAGES
            latent = latents.index(buffer)
            # Of all warps: what the mixture has read may be written. Scores that started before its
            # end would have ptxas run either's instructions one after another.
            mix = hopper.warpgroup_mma_wait(0, deps=[flying])
            barrier()
            if tile + 1 < last:
                coming = (tile + 1 - first) % STAGES
                fetch_tile(
                    latents.index(coming), ropes.index(coming), pages, page, tile + 1, length,
                    PAGE, L, D, num_warps,
                )  # fmt: skip
            async_copy.commit_group()
            page = page_of(table, tile + 2, last, TOKENS, PAGE)
            async_copy.wait_group(1)
            hopper.fence_async_shared()
            scores = hopper.warpgroup_mma(
                q_rope, ropes.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            scores = hopper.warpgroup_mma(q_latent, latent.permute((1, 0)), scores, is_async=True)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])
            scores = gl.where(tile * TOKENS + token < seen, scores * scale, float("-inf"))
            highest = gl.maximum(most, gl.max(scores, 1))
            p = gl.exp2(scores - highest[:, None])
            shrink = gl.exp2(most - highest)
            total = total * gl.convert_layout(shrink, OF_TOTAL)[:, None, None] + _folded(p)
            most = highest
            shares.store(p.to(act))
            hopper.fence_async_shared()
            by = gl.convert_layout(shrink, gl.SliceLayout(1, MIXED))[:, None]
            flying = hopper.warpgroup_mma(shares, latent, mix * by, is_async=True)

        mix = hopper.warpgroup_mma_wait(0, deps=[flying])
        whole = gl.convert_layout(gl.sum(gl.sum(total, 2), 1), gl.SliceLayout(1, SCORES))
        share = 1.0 / gl.where(whole == 0, 1.0, whole)
        here = (row * parts + part) * queries + n
        gl.store(weight + here, most + gl.log2(whole), mask=n < queries)
        done = mix * gl.convert_layout(share, gl.SliceLayout(1, MIXED))[:, None]
        n = block + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, MIXED))
        lane = gl.arange(0, L, layout=gl.SliceLayout(0, MIXED))
        here = (row * parts + part) * queries + n
        at = mixed + (here[:, None] * L + lane[None, :])
        gl.store(at, done, mask=(n < queries)[:, None] & (lane >= 0)[None, :])
