"""Products of MXFP4 experts with the sorted slots of many tokens, on Hopper's warpgroup products.

A program multiplies two tiles of an expert's rows, each 16 rows a warp, with a block of its slots.
Words pass through shared memory to the lanes that the packed form (expert_tiles.py) meant them for,
and from there, multiplied out, within registers to the tensor cores. While one tile is multiplied,
the words of the other are multiplied out. A block's number of slots need not be a power of two: it
comes in pieces that are, one product each.

Slots are bf16, or e4m3 with a scale each. Beside e4m3 the weights are e4m3 too, 2 ** 6 times too
large for a row's largest scale: exact down to 2 ** -11 of that, and smaller scales count as that.
They come in a packed form of their own, for which a group's scale makes a table of eight bytes.
"""

from functools import partial
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_activation import Activation, activate, activation_options
from tercel.ops._lib.kernel_grouped_experts import Form
from tercel.ops._lib.kernel_slot_products import Experts, Matrix, rows_in_act
from tercel.ops._lib.kernel_slots import Slots, column_of, ends

# Triton 3.9 has renamed it.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

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


def choose(slots_per_expert: float, *, stages: int = MOST_STAGES) -> Block:
    pieces = next(pieces for most, pieces in PIECES if slots_per_expert <= most)
    return Block(pieces, FEWEST_WARPS, stages)


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


WARPGROUPS = Form(choose, product, rows_in_act, partial(serves, e4m3=False))


@gluon.constexpr_function
def _words_layout(loads, warps):
    """[load, tile, g, q, half, parity]: a lane's words of the tile of its warp."""
    lanes = [[0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0]] + [[0, 0, 1 << i, 0, 0, 0] for i in range(3)]
    across = [[0, 1 << i, 0, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    registers = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]][: 1 + loads]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [loads, warps, 8, 4, 2, 2])


@gluon.constexpr_function
def _sums_layout(slots, warps, depth):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, slots, depth])


@gluon.constexpr_function
def _left_layout(slots, warps, width):
    return gl.DotOperandLayout(0, _sums_layout(slots, warps, 32 // width), 4 // width)


@gluon.constexpr_function
def _axis_layout(axis, layout):
    """Of a vector along one of six axes."""
    for other in range(5, axis, -1):
        layout = gl.SliceLayout(other, layout)
    for _ in range(axis):
        layout = gl.SliceLayout(0, layout)
    return layout


@gluon.jit
def _along(axis: gl.constexpr, size: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. size - 1 along one of six axes."""
    x = gl.arange(0, size, layout=_axis_layout(axis, LAYOUT))
    for _ in gl.static_range(axis):
        x = gl.expand_dims(x, 0)
    for other in gl.static_range(5 - axis):
        x = gl.expand_dims(x, axis + 1 + other)
    return x


@gluon.jit
def _both_scaled(pairs, scale):
    """bf16 pairs times a pair, the lower and the upper ones."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; mul.rn.bf16x2 t, $2, $3; mov.b32 {$0, $1}, t; }", "=h,=h,r,r",
        [pairs, scale], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _to_bf16(w, byte):
    """[load, tile, half, g, k of 64] of words and their groups' scale bytes, 2 ** 63 too small."""
    scale = byte * 0x00800080 + 63 * 0x00800080
    kept: gl.constexpr = -0x7E3F7E40  # bits 15 and 8..6 of both halves
    sign: gl.constexpr = -0x7FFF8000
    a0, b0 = _both_scaled(w & kept, scale)
    a1, b1 = _both_scaled((w << 3) & kept, scale)
    a2, b2 = _both_scaled(((w << 6) & 0x01C001C0) | ((w << 1) & sign), scale)
    a3, b3 = _both_scaled(((w >> 3) & 0x01C001C0) | ((w << 2) & sign), scale)
    first = gl.join(gl.join(a0, b0), gl.join(a1, b1))
    second = gl.join(gl.join(a2, b2), gl.join(a3, b3))
    # Register 2 * h + c and its halves b: [load, tile, g, q, half, parity, b, c, h].
    return gl.permute(gl.join(first, second), (1, 4, 2, 0, 5, 8, 7, 3, 6))


@gluon.jit
def _looked_up(low, high, index):
    """Of eight bytes, those that four nibbles name."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, index], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _four(word):
    """A word's bytes as e4m3 along two new axes."""
    twice = gl.join(word, word)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.join(twice, twice)], gl.float8e4nv,
        is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _to_e4m3(w, power):
    """[load, tile, half, g, k of 64] of words and their groups' powers, of which 1 is that at which
    half is e4m3's smallest normal value."""
    # The eight magnitudes' codes: 0, 0.5, 1 and 1.5; 2, 3, 4 and 6.
    low = power * 0x08080800 + 0x0C080000
    high = power * 0x08080808 + 0x1C181410
    index = w & 0x77777777
    signs: gl.constexpr = -0x7F7F7F80
    first = _looked_up(low, high, index) | (w & signs)
    second = _looked_up(low, high, index >> 16) | ((w << 4) & signs)
    # Word h and its bytes b: [load, tile, g, q, half, parity, b, b, h].
    return gl.permute(gl.join(_four(first), _four(second)), (1, 4, 2, 0, 5, 8, 3, 6, 7))


@gluon.jit
def _operand(words, scales, E4M3: gl.constexpr, LAYOUT: gl.constexpr):
    """[16 * tiles, 64 * loads] of words [loads * tiles, 128] and scales [loads * tiles, 32]."""
    SHAPE: gl.constexpr = LAYOUT.shape
    w = gl.convert_layout(words.reshape(SHAPE), LAYOUT, assert_trivial=True)
    own: gl.constexpr = [SHAPE[0], SHAPE[1], 8, 4, 1, 1]
    s = gl.convert_layout(scales.reshape(own), LAYOUT)
    byte = (s >> (16 * _along(4, 2, LAYOUT) + 8 * _along(5, 2, LAYOUT))) & 255
    values = _to_e4m3(w, byte) if E4M3 else _to_bf16(w, byte)
    return values.reshape([16 * SHAPE[1], 64 * SHAPE[0]])


@gluon.jit
def _add_product(operand, values, sums, PIECES: gl.constexpr, num_warps: gl.constexpr):
    """Starts the product with every piece of a block."""
    WIDTH: gl.constexpr = operand.dtype.primitive_bitwidth // 8
    started = ()
    for piece in gl.static_range(len(PIECES)):
        left = gl.convert_layout(
            operand, _left_layout(PIECES[piece], num_warps, WIDTH), assert_trivial=True
        )
        right = values[piece].permute((1, 0))
        sum = hopper.warpgroup_mma(left, right, sums[piece], is_async=True)
        started = started + (sum,)  # noqa: RUF005
    return started


@gluon.jit
def _zeros(ROWS: gl.constexpr, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.zeros([ROWS, SLOTS], gl.float32, LAYOUT)


@gluon.jit
def _finished(sums, last, PIECES: gl.constexpr):
    """Accumulators `sums`, when at most as many products are under way as a tile has pieces, or,
    with `last`, none."""
    WAIT: gl.constexpr = 0 if last else len(PIECES)
    done = hopper.warpgroup_mma_wait(WAIT, deps=sums)
    return done if len(PIECES) > 1 else (done,)


@gluon.jit
def _rows(x, row, real, COPY: gl.constexpr, K: gl.constexpr, DEPTH: gl.constexpr):
    """Pointers to the first DEPTH elements of rows, and which are wanted."""
    element = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, COPY))
    source = x + row[:, None] * K + element[None, :]
    return source, real[:, None] & (element >= 0)[None, :]


@gluon.jit
def _places(first, count, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    place = first + gl.arange(0, SLOTS, layout=LAYOUT)
    return place, place < count


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


@gluon.jit
def _row_of(tile, half, g, M: gl.constexpr, UP: gl.constexpr):
    """The row of the matrix: gate and up rows of the same eight columns share a tile of FC1."""
    if UP:
        return half * (M // 2) + tile * 8 + g
    else:
        return tile * 16 + half * 8 + g


@gluon.jit
def _store(
    sums, lists, x_scale, largest, out, tile, first_row, first, count,
    CHOSEN: gl.constexpr,
    M: gl.constexpr,
    SLOTS: gl.constexpr,
    UP: gl.constexpr,
    BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """A piece's sums of the tiles from `tile` on, activated in FC1."""
    act: gl.constexpr = out.dtype.element_ty
    if x_scale is None:
        sums = sums * 9223372036854775808.0  # 2 ** 63
    else:
        SUMS: gl.constexpr = sums.type.layout
        place, real = _places(first, count, SLOTS, gl.SliceLayout(0, SUMS))
        source, _ = ends(lists, first_row, place, real, CHOSEN, UP)
        row = gl.arange(0, num_warps * 16, layout=gl.SliceLayout(1, SUMS))
        byte = gl.load(largest + _row_of(tile + row // 16, row % 16 // 8, row % 8, M, UP))
        power = gl.maximum(byte.to(gl.int32) - 6, 0) << 23
        sums = sums * power.to(gl.float32, bitcast=True)[:, None]
        sums = sums * gl.load(x_scale + source, mask=real, other=0.0)[None, :]
    if UP:
        halves = sums.to(act).to(gl.float32).reshape([num_warps, 2, 8, SLOTS])
        gate, up = gl.split(gl.permute(halves, (0, 2, 3, 1)))
        done = activate(gate, up, act, BETA, LINEAR_BETA).reshape([num_warps * 8, SLOTS])
    else:
        done = sums
    HEIGHT: gl.constexpr = num_warps * 8 if UP else num_warps * 16
    STORE: gl.constexpr = gl.BlockedLayout(
        [8, 1], [HEIGHT // 8, 256 // HEIGHT], [1, num_warps], [0, 1]
    )
    done = gl.convert_layout(done.to(act), STORE)
    place, real = _places(first, count, SLOTS, gl.SliceLayout(0, STORE))
    _, row = ends(lists, first_row, place, real, CHOSEN, UP)
    element = tile * (HEIGHT // num_warps) + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, STORE))
    if UP and x_scale is None:
        element = column_of(element)  # FC2 reads it as it is
    at = row[None, :] * (M // 2 if UP else M) + element[:, None]
    gl.store(out + at, done, mask=real[None, :] & (element >= 0)[:, None])


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
    LANES: gl.constexpr = _words_layout(AT_ONCE, num_warps)
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
            start = first + _slots_before(PIECES, piece)
            place, real = _places(start, count, PIECES[piece], gl.SliceLayout(1, COPY))
            row, _ = ends(lists, first_row, place, real, CHOSEN, UP)
            source, inside = _rows(x, row, real, COPY, K, DEPTH)
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
            zero = _zeros(
                16 * num_warps, PIECES[piece], _sums_layout(PIECES[piece], num_warps, DEPTH // 4)
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
                left = _operand(words0[stage].load(WORDS), scales0, AT_ONCE == 2, LANES)
                flying0 = _add_product(left, ring[stage], sums0, PIECES, num_warps)
                sums1 = _finished(flying1, False, PIECES)
                left = _operand(words1[stage].load(WORDS), scales1, AT_ONCE == 2, LANES)
                flying1 = _add_product(left, ring[stage], sums1, PIECES, num_warps)
                sums0 = _finished(flying0, False, PIECES)
                scales0 = next0
                scales1 = next1
                next0 = after0
                next1 = after1
        async_copy.wait_group(0)
        sums1 = _finished(flying1, True, PIECES)
        for piece in gl.static_range(len(PIECES)):
            start = first + _slots_before(PIECES, piece)
            _store(
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
                BETA,
                LINEAR_BETA,
                num_warps,
            )
            _store(
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
                BETA,
                LINEAR_BETA,
                num_warps,
            )


@gluon.constexpr_function
def _slots_before(pieces, piece):
    return sum(pieces[:piece])


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
