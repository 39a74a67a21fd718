"""Products of MXFP4 experts with the sorted slots of many tokens, on Hopper's warpgroup products.

A program multiplies two tiles of an expert's rows, each 16 rows a warp, with a block of its slots.
Words pass through shared memory to the lanes that the packed form (expert_tiles.py) meant them for,
and from there, multiplied out, within registers to the tensor cores. While one tile is multiplied,
the words of the other are multiplied out. A block's number of slots need not be a power of two: it
comes in pieces that are, one product each. Slots are bf16, or e4m3 with a scale each.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_activation import Activation, activation_options
from tercel.ops._lib.kernel_slot_operands import (
    add_product,
    copy_to_shared,
    finished,
    operand_of,
    places,
    pointers,
    slots_before,
    store,
    sums_layout,
    words_layout,
    zeros_of,
)
from tercel.ops._lib.kernel_slot_products import Experts, Matrix
from tercel.ops._lib.kernel_slots import Slots, ends

MOST_STAGES = 7
"""Buffers in the ring, of which two are being read."""
FEWEST_WARPS = 4


class Block(NamedTuple):
    """How a product is cut into programs."""

    pieces: tuple[int, ...]
    """Slots of an expert per program, in powers of two."""
    warps: int = 8
    stages: int = MOST_STAGES
    """As many buffers, or fewer, where that divides the steps."""

    @property
    def slots(self) -> int:
        return sum(self.pieces)


PIECES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (8, (16,)),
    (48, (32,)),
    (96, (64,)),
    (1 << 30, (64, 32)),
)
"""The first row whose limit on slots per expert, if all were here, holds a call decides;
benchmarks/experts_prefill.py and, few slots, benchmarks/experts_crossover.py measure them."""


def choose(slots_per_expert: float, *, e4m3: bool) -> Block:
    pieces = next(pieces for most, pieces in PIECES if slots_per_expert <= most)
    return Block(pieces, FEWEST_WARPS, 4 if e4m3 else MOST_STAGES)


def serves(z: torch.Tensor, experts: Experts, *, e4m3: bool) -> bool:
    """Whether rows are bf16 and the experts MXFP4 of a width and a latent that are cut without a
    rest."""
    width, latent = experts.width, experts.latent
    matrices = ((2 * width, latent), (latent, width))
    is_served = z.dtype == torch.bfloat16 and experts.up.scales is not None
    return is_served and all(
        rows % (32 * FEWEST_WARPS) == 0 and stages(depth, e4m3=e4m3) > 0 for rows, depth in matrices
    )


def stages(depth: int, *, e4m3: bool, most: int = MOST_STAGES) -> int:
    """Buffers that the steps of a row of `depth` elements fill without a rest; 0: there are too few
    or the packed form has padded groups."""
    loads, at_once = Split(depth).parts * Split(depth).loads, 2 if e4m3 else 1
    if 64 * loads != depth or loads % at_once:
        return 0
    wanted = (*range(most, 2, -1), *range(most + 1, MOST_STAGES + 1))
    return next((count for count in wanted if loads // at_once % count == 0), 0)


def product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    slots: Slots,
    matrix: Matrix,
    out: torch.Tensor,
    block: Block,
    activation: Activation | None,
) -> torch.Tensor:
    """As that of kernel_slot_products.py, where `stages` and the block's rows divide the matrix."""
    is_up = activation is not None
    tokens, depth = slots.lists.shape[1], x.shape[1]
    rows = out.shape[1] * (2 if is_up else 1)
    warps = block.warps if rows % (32 * block.warps) == 0 else FEWEST_WARPS
    split = Split(depth)
    _multiply[(rows // (32 * warps), slots.blocks)](
        x, x_scale, *slots[:4], *matrix, out, tokens,
        CHOSEN=len(out) // tokens, M=rows, K=depth, PIECES=block.pieces,
        STAGES=stages(depth, e4m3=x_scale is not None, most=block.stages), UP=is_up,
        **activation_options(activation),
        PARTS=split.parts, LOADS=split.loads, OCTETS=split.octets, num_warps=warps,
    )  # fmt: skip
    return out


@gluon.jit
def _scales_of(
    scales, turn, load,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr,
    LOADS: gl.constexpr,
    OCTETS: gl.constexpr,
):  # fmt: skip
    """The lanes' scales of a turn's step `STEP`, which may be one of the next turn; past the last,
    any."""
    turn = gl.minimum(turn + STEP // STAGES, STEPS // STAGES - 1)
    load += STEP % STAGES * AT_ONCE
    PARTS: gl.constexpr = STAGES * AT_ONCE // LOADS  # in a turn
    if PARTS * LOADS == STAGES * AT_ONCE:
        part = turn * PARTS + load // LOADS
    else:
        load += turn * (STAGES * AT_ONCE)
        part = load // LOADS
    load = load % LOADS
    at = load // LOADS * (OCTETS * 32) + load // 4 * 32 + load % 4
    return gl.load(scales + (part * (OCTETS * 32) + at)[:, None])


@gluon.jit(do_not_specialize=("tokens",))
def _multiply(
    x,  # FC1: [tokens, K], FC2: [slots, K] bf16 or e4m3, in the order of columns
    x_scale,  # e4m3: f32 of each row
    lists,  # [experts, tokens] i32
    counts,  # [experts] i32
    first_rows,  # [experts] i32
    plan,
    words,  # packed
    scales,
    largest,  # e4m3: [experts, M] u8
    out,  # [slots, M or M / 2] bf16
    tokens,
    CHOSEN: gl.constexpr,
    M: gl.constexpr,
    K: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    UP: gl.constexpr,
    BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr,
    PARTS: gl.constexpr,
    LOADS: gl.constexpr,
    OCTETS: gl.constexpr,
    num_warps: gl.constexpr,
):
    AT_ONCE: gl.constexpr = 1 if x_scale is None else 2  # loads of a tile
    DEPTH: gl.constexpr = 64 * AT_ONCE
    STEPS: gl.constexpr = K // DEPTH
    AHEAD: gl.constexpr = STAGES - 2
    COPY: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [num_warps, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])
    LANES: gl.constexpr = words_layout(AT_ONCE, num_warps)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16 // AT_ONCE, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    block = gl.program_id(1)
    if block < gl.load(plan):
        expert = gl.load(plan + 1 + 2 * block)
        first = gl.load(plan + 2 + 2 * block)
        count = gl.load(counts + expert)
        first_row = gl.load(first_rows + expert)
        lists += expert.to(gl.int64) * tokens
        tile = gl.program_id(0) * (2 * num_warps)
        sources = ()
        wanted = ()
        for piece in gl.static_range(len(PIECES)):
            start = first + slots_before(PIECES, piece)
            place, real = places(start, count, PIECES[piece], gl.SliceLayout(1, COPY))
            row, _ = ends(lists, first_row, place, real, CHOSEN, UP)
            source, inside = pointers(x, row, real, COPY, K, DEPTH)
            sources = sources + (source,)  # noqa: RUF005
            wanted = wanted + (inside,)  # noqa: RUF005
        # Tiles of the upper half of a program's rows lie this far behind.
        WORDS_APART: gl.constexpr = num_warps * PARTS * LOADS * 128
        SCALES_APART: gl.constexpr = num_warps * PARTS * OCTETS * 32
        index = gl.arange(0, AT_ONCE * num_warps, layout=gl.SliceLayout(1, WORDS))
        lane = gl.arange(0, 128, layout=gl.SliceLayout(0, WORDS))
        words += expert.to(gl.int64) * (M // 16 * PARTS * LOADS * 128)
        start = (tile + index % num_warps) * (PARTS * LOADS) + index // num_warps
        own_words = words + (start[:, None] * 128 + lane[None, :])
        index = gl.arange(0, AT_ONCE * num_warps, layout=gl.SliceLayout(1, SCALES))
        lane = gl.arange(0, 32, layout=gl.SliceLayout(0, SCALES)) // 4 * 4
        scales += expert.to(gl.int64) * (M // 16 * PARTS * OCTETS * 32)
        start = (tile + index % num_warps) * (PARTS * OCTETS * 32)
        own_scales = scales + (start[:, None] + lane[None, :])
        load = index // num_warps
        if largest is not None:
            largest += expert.to(gl.int64) * M
        ring = ()
        words0 = ()
        words1 = ()
        for _ in gl.static_range(STAGES):
            buffers = ()
            for piece in gl.static_range(len(PIECES)):
                buffer = gl.allocate_shared_memory(
                    x.dtype.element_ty, [PIECES[piece], DEPTH], SHARED
                )
                buffers = buffers + (buffer,)  # noqa: RUF005
            ring = ring + (buffers,)  # noqa: RUF005
            buffer = gl.allocate_shared_memory(gl.int32, [AT_ONCE * num_warps, 128], PLAIN)
            words0 = words0 + (buffer,)  # noqa: RUF005
            buffer = gl.allocate_shared_memory(gl.int32, [AT_ONCE * num_warps, 128], PLAIN)
            words1 = words1 + (buffer,)  # noqa: RUF005
        for step in gl.static_range(AHEAD):
            _fetch(
                ring[step], words0[step], words1[step], None, sources, wanted, own_words,
                step, DEPTH, AT_ONCE, WORDS_APART, PIECES,
            )  # fmt: skip
        upper_scales = own_scales + SCALES_APART
        scales0 = _scales_of(own_scales, 0, load, 0, STEPS, STAGES, AT_ONCE, LOADS, OCTETS)
        scales1 = _scales_of(upper_scales, 0, load, 0, STEPS, STAGES, AT_ONCE, LOADS, OCTETS)
        next0 = _scales_of(own_scales, 0, load, 1, STEPS, STAGES, AT_ONCE, LOADS, OCTETS)
        next1 = _scales_of(upper_scales, 0, load, 1, STEPS, STAGES, AT_ONCE, LOADS, OCTETS)
        zeros = ()
        for piece in gl.static_range(len(PIECES)):
            zero = zeros_of(
                16 * num_warps, PIECES[piece], sums_layout(PIECES[piece], num_warps, DEPTH // 4)
            )
            zeros = zeros + (zero,)  # noqa: RUF005
        sums0 = zeros
        flying1 = ()
        for piece in gl.static_range(len(PIECES)):
            sum = hopper.warpgroup_mma_init(zeros[piece])
            flying1 = flying1 + (sum,)  # noqa: RUF005
        for turn in range(STEPS // STAGES):
            here = ()
            for piece in gl.static_range(len(PIECES)):
                here = here + (sources[piece] + turn * (STAGES * DEPTH),)  # noqa: RUF005
            words_here = own_words + turn * (STAGES * AT_ONCE * 128)
            for stage in gl.static_range(STAGES):
                async_copy.wait_group(AHEAD - 1)
                hopper.fence_async_shared()
                more = None if stage + AHEAD < STAGES else turn < STEPS // STAGES - 1
                _fetch(
                    ring[(stage + AHEAD) % STAGES],
                    words0[(stage + AHEAD) % STAGES],
                    words1[(stage + AHEAD) % STAGES],
                    more, here, wanted, words_here,
                    stage + AHEAD, DEPTH, AT_ONCE, WORDS_APART, PIECES,
                )  # fmt: skip
                after0 = _scales_of(
                    own_scales, turn, load, stage + 2, STEPS, STAGES, AT_ONCE, LOADS, OCTETS
                )
                after1 = _scales_of(
                    upper_scales, turn, load, stage + 2, STEPS, STAGES, AT_ONCE, LOADS, OCTETS
                )
                left = operand_of(words0[stage].load(WORDS), scales0, AT_ONCE == 2, LANES)
                flying0 = add_product(left, ring[stage], sums0, PIECES, num_warps)
                sums1 = finished(flying1, False, PIECES)
                left = operand_of(words1[stage].load(WORDS), scales1, AT_ONCE == 2, LANES)
                flying1 = add_product(left, ring[stage], sums1, PIECES, num_warps)
                sums0 = finished(flying0, False, PIECES)
                scales0 = next0
                scales1 = next1
                next0 = after0
                next1 = after1
        async_copy.wait_group(0)
        sums1 = finished(flying1, True, PIECES)
        for piece in gl.static_range(len(PIECES)):
            start = first + slots_before(PIECES, piece)
            store(
                sums0[piece],
                lists,
                x_scale,
                largest,
                out,
                tile,
                first_row,
                start,
                count,
                CHOSEN,
                M,
                PIECES[piece],
                UP,
                UP,
                BETA,
                LINEAR_BETA,
                num_warps,
            )
            store(
                sums1[piece],
                lists,
                x_scale,
                largest,
                out,
                tile + num_warps,
                first_row,
                start,
                count,
                CHOSEN,
                M,
                PIECES[piece],
                UP,
                UP,
                BETA,
                LINEAR_BETA,
                num_warps,
            )


@gluon.jit
def _fetch(
    buffers, words0, words1, more, sources, wanted, words,
    STEP: gl.constexpr,
    DEPTH: gl.constexpr,
    AT_ONCE: gl.constexpr,
    WORDS_APART: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step, unless there is no `more`."""
    for piece in gl.static_range(len(PIECES)):
        mask = wanted[piece] if more is None else wanted[piece] & more
        copy_to_shared(buffers[piece], sources[piece] + STEP * DEPTH, mask=mask)
    copy_to_shared(words0, words + STEP * (AT_ONCE * 128), mask=more)
    copy_to_shared(words1, words + (WORDS_APART + STEP * (AT_ONCE * 128)), mask=more)
    async_copy.commit_group()
