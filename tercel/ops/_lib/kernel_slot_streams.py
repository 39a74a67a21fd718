"""Products of MXFP4 experts with the sorted slots of many tokens, by warpgroups of two kinds.

One program a multiprocessor takes piece of work after piece of work: a block of an expert's slots
and a group of its rows. One partition of its warps copies words, scales and slots into a ring of
buffers and runs ahead into the next piece; the others multiply a part of the group's rows each, at
their own pace, as kernel_slot_operands.py says. What one waits for, another computes: words are
multiplied out while tensor cores run, and sums are stored while the next piece is on its way.

Every partition has code of its own, and together it exceeds what instructions are kept in close by:
so loops stay rolled, a partition that activates has twice the warps, and beside e4m3 gate and up
leave FC1 as they are, for the launch that rounds them (kernel_row_e4m3.py) to activate.
"""

from functools import partial
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tercel.ops._lib import kernel_slot_wgmma
from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_activation import Activation, activation_options
from tercel.ops._lib.kernel_grouped_experts import Form
from tercel.ops._lib.kernel_row_e4m3 import rows_in_e4m3
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
from tercel.ops._lib.kernel_slot_products import Experts, Matrix, rows_in_act
from tercel.ops._lib.kernel_slot_wgmma import Block
from tercel.ops._lib.kernel_slots import Slots, ends

GROUP = 256
"""Rows of a piece of work."""
PRODUCTS = gl.constexpr(2)
"""Of a step, which one buffer holds."""
COPYING = gl.constexpr(4)
"""Warps that copy."""
REGISTERS, FEW_REGISTERS = gl.constexpr(104), gl.constexpr(56)
"""A thread's that multiplies, and one's that copies; the first partition has what is left."""


class Stream(NamedTuple):
    """How a product is cut into pieces of work, and what serves where it cannot be."""

    block: Block
    stages: int
    """Buffers in the ring."""

    @property
    def slots(self) -> int:
        return self.block.slots


FEWEST_SLOTS, FEWEST_SLOTS_E4M3 = 96, 64
"""Of a block; chosen by measurement (benchmarks/experts_prefill.py)."""


def choose(slots_per_expert: float, *, e4m3: bool) -> Block | Stream:
    block = kernel_slot_wgmma.choose(slots_per_expert, e4m3=e4m3)
    if block.slots < (FEWEST_SLOTS_E4M3 if e4m3 else FEWEST_SLOTS):
        return block
    return Stream(block, 3 if e4m3 else 4)


def columns(cut: Block | Stream, experts: Experts, *, e4m3: bool) -> int:
    """Of a row that FC1 writes."""
    rows = 2 * experts.width
    is_raw = e4m3 and isinstance(cut, Stream) and _divides(rows, experts.latent, e4m3=True)
    return rows if is_raw else experts.width


def rows(
    x: torch.Tensor, slots: Slots | None, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3 and their scales, activated where FC1 has not."""
    is_raw = slots is not None and x.shape[1] != experts.width
    return rows_in_e4m3(x, slots, four=True, activation=experts.activation if is_raw else None)


def product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    slots: Slots,
    matrix: Matrix,
    out: torch.Tensor,
    cut: Block | Stream,
    activation: Activation | None,
) -> torch.Tensor:
    """As that of kernel_slot_products.py; FC1 with e4m3 writes rows of `columns` elements, of which
    eight gates and eight ups take turns where they are not activated."""
    rows, depth, e4m3 = 16 * matrix.values.shape[1], x.shape[1], x_scale is not None
    if isinstance(cut, Block) or not _divides(rows, depth, e4m3=e4m3):
        block = cut if isinstance(cut, Block) else cut.block
        return kernel_slot_wgmma.product(x, x_scale, slots, matrix, out, block, activation)
    is_activated = activation is not None and not e4m3
    tokens, split = slots.lists.shape[1], Split(depth)
    partitions = 2 if is_activated else 4
    _stream[(_multiprocessors(x),)](
        x, x_scale, *slots[:4], *matrix, out, tokens,
        CHOSEN=len(out) // tokens, M=rows, K=depth, PIECES=cut.block.pieces, STAGES=cut.stages,
        UP=activation is not None, ACTIVATED=is_activated, **activation_options(activation),
        SPLIT=(split.parts, split.loads, split.octets), PARTITIONS=partitions,
        num_warps=GROUP // 16 // partitions,
    )  # fmt: skip
    return out


def _divides(rows: int, depth: int, *, e4m3: bool) -> bool:
    return rows % GROUP == 0 and depth % (PRODUCTS.value * (128 if e4m3 else 64)) == 0


def _multiprocessors(x: torch.Tensor) -> int:
    if x.device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count


WARPGROUPS = Form(
    partial(choose, e4m3=False),
    product,
    rows_in_act,
    partial(kernel_slot_wgmma.serves, e4m3=False),
)
WARPGROUPS_E4M3 = Form(
    partial(choose, e4m3=True),
    product,
    rows,
    partial(kernel_slot_wgmma.serves, e4m3=True),
    partial(columns, e4m3=True),
)


@gluon.constexpr_function
def _scales_layout(loads, warps):
    """[load * warps + warp, g], the same for a row's four lanes."""
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    registers = [[warps, 0]] if loads == 2 else []
    across = [[1 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [warps * loads, 8])


@gluon.jit
def _work(plan, counts, first_rows, index, GROUPS: gl.constexpr):
    """(Expert, first place in its list, its count, its first row in sorted order, group of rows) of
    a piece of work."""
    block = index // GROUPS
    expert = gl.load(plan + 1 + 2 * block)
    first = gl.load(plan + 2 + 2 * block)
    return expert, first, gl.load(counts + expert), gl.load(first_rows + expert), index % GROUPS


@gluon.jit
def _after(stage, phase, STAGES: gl.constexpr):
    """The buffer after that of `stage`, and the phase of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _copy(
    shared, slots, x, words, scales,
    CHOSEN: gl.constexpr,
    M: gl.constexpr,
    K: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    UP: gl.constexpr,
    SPLIT: gl.constexpr,
    TILES: gl.constexpr,
    EACH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Fills the ring. A partition that multiplies has `EACH` of a group's `TILES`."""
    ring, words_ring, scales_ring, full, empty = shared
    lists, counts, first_rows, plan, tokens = slots
    PARTS: gl.constexpr = SPLIT[0]
    LOADS: gl.constexpr = SPLIT[1]
    OCTETS: gl.constexpr = SPLIT[2]
    WIDTH: gl.constexpr = x.dtype.element_ty.primitive_bitwidth
    AT_ONCE: gl.constexpr = PRODUCTS * (16 // WIDTH)
    DEPTH: gl.constexpr = 64 * (16 // WIDTH)
    VECTOR: gl.constexpr = 128 // WIDTH
    ACROSS: gl.constexpr = DEPTH // VECTOR
    COPY: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, AT_ONCE * TILES, layout=gl.SliceLayout(1, WORDS))
    lane = gl.arange(0, 128, layout=gl.SliceLayout(0, WORDS))
    tile = row // (EACH * AT_ONCE) * EACH + row % EACH
    words_at = (tile * (PARTS * LOADS) + row // EACH % AT_ONCE)[:, None] * 128 + lane[None, :]
    row = gl.arange(0, AT_ONCE * TILES, layout=gl.SliceLayout(1, SCALES))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, SCALES)) * 4
    tile = row // (EACH * AT_ONCE) * EACH + row % EACH
    load = row // EACH % AT_ONCE
    scales_at = (tile * (PARTS * OCTETS * 32))[:, None] + lane[None, :]
    GROUPS: gl.constexpr = M // (16 * TILES)
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), gl.load(plan) * GROUPS, gl.num_programs(0)):
        expert, first, count, first_row, group = _work(plan, counts, first_rows, index, GROUPS)
        first_tile = expert.to(gl.int64) * (M // 16) + group * TILES
        own_words = words + first_tile * (PARTS * LOADS * 128)
        own_scales = scales + first_tile * (PARTS * OCTETS * 32)
        own = lists + expert.to(gl.int64) * tokens
        sources = ()
        wanted = ()
        for piece in gl.static_range(len(PIECES)):
            start = first + slots_before(PIECES, piece)
            place, real = places(start, count, PIECES[piece], gl.SliceLayout(1, COPY))
            place_row, _ = ends(own, first_row, place, real, CHOSEN, UP)
            source, inside = pointers(x, place_row, real, COPY, K, DEPTH)
            sources = sources + (source,)  # noqa: RUF005
            wanted = wanted + (inside,)  # noqa: RUF005
        for step in range(K // (64 * AT_ONCE)):
            mbarrier.wait(empty.index(stage), phase)
            copy_to_shared(words_ring.index(stage), own_words + step * (AT_ONCE * 128) + words_at)
            at = step * AT_ONCE + load
            within = at % LOADS
            at = at // LOADS * (OCTETS * 32) + within // 4 * 32 + within % 4
            copy_to_shared(scales_ring.index(stage), own_scales + (scales_at + at[:, None]))
            for part in gl.static_range(PRODUCTS):
                for piece in gl.static_range(len(PIECES)):
                    copy_to_shared(
                        ring[piece].index(stage * PRODUCTS + part),
                        sources[piece] + (step * PRODUCTS + part) * DEPTH,
                        mask=wanted[piece],
                    )
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _multiply_part(
    shared, slots, x_scale, largest, out,
    CHOSEN: gl.constexpr,
    M: gl.constexpr,
    K: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    UP: gl.constexpr,
    ACTIVATED: gl.constexpr,
    BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr,
    PARTITIONS: gl.constexpr,
    PARTITION: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Multiplies a partition's rows of each group."""
    ring, words_ring, scales_ring, full, empty = shared
    lists, counts, first_rows, plan, tokens = slots
    E4M3: gl.constexpr = x_scale is not None
    LOADS: gl.constexpr = 2 if E4M3 else 1
    HELD: gl.constexpr = WARPS * LOADS
    INNER: gl.constexpr = 32 if E4M3 else 16
    FIRST: gl.constexpr = PARTITION * PRODUCTS
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    SCALES: gl.constexpr = _scales_layout(LOADS, WARPS)
    LANES: gl.constexpr = words_layout(LOADS, WARPS)
    GROUPS: gl.constexpr = M // (16 * WARPS * PARTITIONS)
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), gl.load(plan) * GROUPS, gl.num_programs(0)):
        expert, first, count, first_row, group = _work(plan, counts, first_rows, index, GROUPS)
        sums = ()
        for piece in gl.static_range(len(PIECES)):
            zero = zeros_of(16 * WARPS, PIECES[piece], sums_layout(PIECES[piece], WARPS, INNER))
            sums = sums + (zero,)  # noqa: RUF005
        for _ in range(K // (64 * LOADS * PRODUCTS)):
            mbarrier.wait(full.index(stage), phase)
            hopper.fence_async_shared()
            for part in gl.static_range(PRODUCTS):
                w = words_ring.index(stage).slice((FIRST + part) * HELD, HELD).load(WORDS)
                s = scales_ring.index(stage).slice((FIRST + part) * HELD, HELD).load(SCALES)
                left = operand_of(w, s, E4M3, LANES)
                values = ()
                for piece in gl.static_range(len(PIECES)):
                    values = values + (ring[piece].index(stage * PRODUCTS + part),)  # noqa: RUF005
                started = add_product(left, values, sums, PIECES, WARPS)
                sums = finished(started, True, PIECES)
            mbarrier.arrive(empty.index(stage))
            stage, phase = _after(stage, phase, STAGES)
        own = lists + expert.to(gl.int64) * tokens
        own_largest = None if largest is None else largest + expert.to(gl.int64) * M
        for piece in gl.static_range(len(PIECES)):
            store(
                sums[piece], own, x_scale, own_largest, out,
                (group * PARTITIONS + PARTITION) * WARPS, first_row,
                first + slots_before(PIECES, piece), count,
                CHOSEN, M, PIECES[piece], UP, ACTIVATED, BETA, LINEAR_BETA, WARPS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=("tokens",))
def _stream(
    x,  # FC1: [tokens, K], FC2: [slots, K] bf16 or e4m3, in the order of columns
    x_scale,  # e4m3: f32 of each row
    lists,  # [experts, tokens] i32
    counts,  # [experts] i32
    first_rows,  # [experts] i32
    plan,
    words,  # packed
    scales,
    largest,  # e4m3: [experts, M] u8
    out,  # [slots, M] bf16, or M / 2 that are ACTIVATED
    tokens,
    CHOSEN: gl.constexpr,
    M: gl.constexpr,
    K: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    UP: gl.constexpr,
    ACTIVATED: gl.constexpr,
    BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr,
    SPLIT: gl.constexpr,
    PARTITIONS: gl.constexpr,
    num_warps: gl.constexpr,
):
    WIDTH: gl.constexpr = x.dtype.element_ty.primitive_bitwidth
    DEPTH: gl.constexpr = 64 * (16 // WIDTH)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(DEPTH * WIDTH // 8, WIDTH, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = ()
    for piece in gl.static_range(len(PIECES)):
        buffer = gl.allocate_shared_memory(
            x.dtype.element_ty, [STAGES * PRODUCTS, PIECES[piece], DEPTH], SHARED
        )
        ring = ring + (buffer,)  # noqa: RUF005
    TILES: gl.constexpr = num_warps * PARTITIONS
    HELD: gl.constexpr = PRODUCTS * (16 // WIDTH) * TILES
    words_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HELD, 128], PLAIN)
    scales_ring = gl.allocate_shared_memory(gl.int32, [STAGES, HELD, 8], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=32 * COPYING)
        mbarrier.init(empty.index(stage), count=PARTITIONS)
    shared = (ring, words_ring, scales_ring, full, empty)
    slots = (lists, counts, first_rows, plan, tokens)
    if PARTITIONS == 4:
        gl.warp_specialize(
            [
                (_multiply_part, (
                    shared, slots, x_scale, largest, out, CHOSEN, M, K, PIECES, STAGES, UP,
                    ACTIVATED, BETA, LINEAR_BETA, PARTITIONS, 0, num_warps,
                )),
                (_multiply_part, (
                    shared, slots, x_scale, largest, out, CHOSEN, M, K, PIECES, STAGES, UP,
                    ACTIVATED, BETA, LINEAR_BETA, PARTITIONS, 1, num_warps,
                )),
                (_multiply_part, (
                    shared, slots, x_scale, largest, out, CHOSEN, M, K, PIECES, STAGES, UP,
                    ACTIVATED, BETA, LINEAR_BETA, PARTITIONS, 2, num_warps,
                )),
                (_multiply_part, (
                    shared, slots, x_scale, largest, out, CHOSEN, M, K, PIECES, STAGES, UP,
                    ACTIVATED, BETA, LINEAR_BETA, PARTITIONS, 3, num_warps,
                )),
                (_copy, (
                    shared, slots, x, words, scales, CHOSEN, M, K, PIECES, STAGES, UP, SPLIT,
                    TILES, num_warps, COPYING,
                )),
            ],
            [num_warps, num_warps, num_warps, COPYING],
            [REGISTERS, REGISTERS, REGISTERS, FEW_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply_part, (
                    shared, slots, x_scale, largest, out, CHOSEN, M, K, PIECES, STAGES, UP,
                    ACTIVATED, BETA, LINEAR_BETA, PARTITIONS, 0, num_warps,
                )),
                (_multiply_part, (
                    shared, slots, x_scale, largest, out, CHOSEN, M, K, PIECES, STAGES, UP,
                    ACTIVATED, BETA, LINEAR_BETA, PARTITIONS, 1, num_warps,
                )),
                (_copy, (
                    shared, slots, x, words, scales, CHOSEN, M, K, PIECES, STAGES, UP, SPLIT,
                    TILES, num_warps, COPYING,
                )),
            ],
            [num_warps, COPYING],
            [REGISTERS, FEW_REGISTERS],
        )  # fmt: skip
