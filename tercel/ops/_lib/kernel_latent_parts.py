"""What the kernels of attention/mla_decode that leave parts of every row's context share.

How many parts a row may have follows from shapes alone; how many it has, from its length on the
device, and programs past those leave at once.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tercel.ops._lib.kernel_latent_merge import Config, Where, choose_merge, live_parts, merge

# Triton 3.9 has renamed it.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

PROGRAMS = 264
"""Programs that fill a GPU of 132 multiprocessors twice. A constant: the number of parts decides
bits, which should not differ between GPUs."""
MOST_PARTS = 256
LOG2_E = 1.4426950408889634
SMALLEST = tl.constexpr(-1e30)
"""Below every score, and finite: a row that sees nothing of a part has no NaN."""


class Context(NamedTuple):
    """Queries of a step and what they see, as op.py describes them."""

    query: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    page_scale: torch.Tensor | None
    width: int
    scale: float

    @property
    def queries(self) -> int:
        """Query rows that share a row's entries."""
        return self.width * self.query.shape[1]

    @property
    def capacity(self) -> int:
        """Entries that the block table has room for."""
        return self.block_table.shape[1] * self.pages.shape[1]


def decode(
    kernel: Any,
    context: Context,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    config: Config,
    **options: Any,
) -> torch.Tensor:
    """The op's outputs, of parts that `kernel` leaves; `options` are arguments of it besides."""
    mixed, weight = attend(kernel, context, w_v.shape[2], config, **options)
    where = Where(context.context_lens, context.width, context.capacity, config)
    merged = choose_merge(*context.query.shape[:2], config.parts)
    return merge(mixed, weight, where, w_v, gate, context.query.dtype, merged)


def attend(
    kernel: Any, context: Context, rank: int, config: Config, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mixed [R, parts, width * H, L], weight [R, parts, width * H]), both fp32: what each part's
    softmax mixes, and the logarithm, of base two, of its sum."""
    query, pages, queries = context.query, context.pages, context.queries
    (rows, room), (heads, entry) = context.block_table.shape, query.shape[1:]
    mixed = query.new_empty(rows, config.parts, queries, rank, dtype=torch.float32)
    weight = query.new_empty(rows, config.parts, queries, dtype=torch.float32)
    kernel[(triton.cdiv(queries, config.columns), config.parts, rows)](
        query,
        pages,
        context.block_table,
        context.context_lens,
        context.page_scale,
        mixed,
        weight,
        queries,
        heads,
        context.width,
        room,
        context.scale * LOG2_E,
        PAGE=pages.shape[1],
        L=rank,
        D=entry - rank,
        TOKENS=config.tokens,
        COLUMNS=config.columns,
        LEAST=config.least,
        STAGES=config.stages,
        num_warps=config.warps,
        launch_pdl=True,
        **options,
    )
    return mixed, weight


@triton.jit
def tiles_of(length, part, parts, TOKENS: tl.constexpr, LEAST: tl.constexpr):
    """The first tile of a part and the one behind its last, the same where it has none."""
    tiles = tl.cdiv(length, TOKENS)
    live = live_parts(tiles, parts, LEAST)
    share = tiles // live
    more = tiles % live
    first = part * share + tl.minimum(part, more)
    last = first + share + (part < more).to(tl.int32)
    return first, tl.where(part < live, last, first)


@triton.jit
def page_of(table, tile, last, TOKENS: tl.constexpr, PAGE: tl.constexpr):
    """The page of a tile, or of the part's last."""
    return tl.load(table + tl.minimum(tile, last - 1) * TOKENS // PAGE)


@gluon.constexpr_function
def _copy_layout(width, bits, warps):
    """Of a copy of rows of `width` elements, 16 bytes a thread."""
    vector = 128 // bits
    lanes = min(width // vector, 32)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def fetch(
    latents, ropes, base, rest,
    L: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Starts the copy of rows [L + D] at `base`, to shared memory [N, L] and [N, D]; zeros from the
    rest-th on."""
    BITS: gl.constexpr = latents.dtype.primitive_bitwidth
    WIDE: gl.constexpr = _copy_layout(L, BITS, num_warps)
    NARROW: gl.constexpr = _copy_layout(D, BITS, num_warps)
    # In 64 bits, a thread's copies are constants apart and share an address.
    row = gl.arange(0, latents.shape[0], layout=gl.SliceLayout(1, WIDE))[:, None]
    lane = gl.arange(0, L, layout=gl.SliceLayout(0, WIDE))[None, :]
    source = base + (row.to(gl.int64) * (L + D) + lane)
    copy_to_shared(latents, source, mask=(row + lane * 0) < rest)
    row = gl.arange(0, latents.shape[0], layout=gl.SliceLayout(1, NARROW))[:, None]
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, NARROW))[None, :]
    source = base + L + (row.to(gl.int64) * (L + D) + lane)
    copy_to_shared(ropes, source, mask=(row + lane * 0) < rest)


@gluon.jit
def fetch_tile(
    latents, ropes, pages, page, tile, length,
    PAGE: gl.constexpr,
    L: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Starts the copy of a tile of a page; zeros past a row's end."""
    TOKENS: gl.constexpr = latents.shape[0]
    base = pages + page * (PAGE * (L + D)) + tile * TOKENS % PAGE * (L + D)
    fetch(latents, ropes, base, length - tile * TOKENS, L, D, num_warps)
