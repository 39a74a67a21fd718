"""What products of MXFP4 experts with sorted slots on Hopper's warpgroup products share: words
multiplied out to operands in registers, products with a block's pieces, and what is done with sums.

The left operand is 16 rows a warp, the right one slots in shared memory. Beside e4m3 slots the
weights are e4m3 too, 2 ** 6 times too large for a row's largest scale: exact down to 2 ** -11 of
that, and smaller scales count as that. They come in a packed form of their own (expert_tiles.py),
for which a group's scale makes a table of eight bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tercel.ops._lib.kernel_activation import activate
from tercel.ops._lib.kernel_slots import column_of, ends

# Triton 3.9 has renamed it.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def words_layout(loads, warps):
    """[load, tile, g, q, half, parity]: a lane's words of the tile of its warp."""
    lanes = [[0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0]] + [[0, 0, 1 << i, 0, 0, 0] for i in range(3)]
    across = [[0, 1 << i, 0, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    registers = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]][: 1 + loads]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [loads, warps, 8, 4, 2, 2])


@gluon.constexpr_function
def sums_layout(slots, warps, depth):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, slots, depth])


@gluon.constexpr_function
def _left_layout(slots, warps, width):
    return gl.DotOperandLayout(0, sums_layout(slots, warps, 32 // width), 4 // width)


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
def operand_of(words, scales, E4M3: gl.constexpr, LAYOUT: gl.constexpr):
    """[16 * tiles, 64 * loads] of words [loads * tiles, 128] and scales [loads * tiles, 32], or 8
    that the four lanes of a row share."""
    SHAPE: gl.constexpr = LAYOUT.shape
    w = gl.convert_layout(words.reshape(SHAPE), LAYOUT, assert_trivial=True)
    own: gl.constexpr = [SHAPE[0], SHAPE[1], 8, scales.shape[1] // 8, 1, 1]
    s = gl.convert_layout(scales.reshape(own), LAYOUT)
    byte = (s >> (16 * _along(4, 2, LAYOUT) + 8 * _along(5, 2, LAYOUT))) & 255
    values = _to_e4m3(w, byte) if E4M3 else _to_bf16(w, byte)
    return values.reshape([16 * SHAPE[1], 64 * SHAPE[0]])


@gluon.jit
def add_product(operand, values, sums, PIECES: gl.constexpr, num_warps: gl.constexpr):
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
def zeros_of(ROWS: gl.constexpr, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.zeros([ROWS, SLOTS], gl.float32, LAYOUT)


@gluon.jit
def finished(sums, last, PIECES: gl.constexpr):
    """Accumulators `sums`, when at most as many products are under way as a tile has pieces, or,
    with `last`, none."""
    WAIT: gl.constexpr = 0 if last else len(PIECES)
    done = hopper.warpgroup_mma_wait(WAIT, deps=sums)
    return done if len(PIECES) > 1 else (done,)


@gluon.jit
def pointers(x, row, real, COPY: gl.constexpr, K: gl.constexpr, DEPTH: gl.constexpr):
    """Pointers to the first DEPTH elements of rows, and which are wanted."""
    element = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, COPY))
    source = x + row[:, None] * K + element[None, :]
    return source, real[:, None] & (element >= 0)[None, :]


@gluon.jit
def places(first, count, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    place = first + gl.arange(0, SLOTS, layout=LAYOUT)
    return place, place < count


@gluon.jit
def _row_of(tile, half, g, M: gl.constexpr, UP: gl.constexpr):
    """The row of the matrix: gate and up rows of the same eight columns share a tile of FC1."""
    if UP:
        return half * (M // 2) + tile * 8 + g
    else:
        return tile * 16 + half * 8 + g


@gluon.jit
def store(
    sums, lists, x_scale, largest, out, tile, first_row, first, count,
    CHOSEN: gl.constexpr,
    M: gl.constexpr,
    SLOTS: gl.constexpr,
    UP: gl.constexpr,
    ACTIVATED: gl.constexpr,
    BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """A piece's sums of the tiles from `tile` on, which FC1 may activate."""
    act: gl.constexpr = out.dtype.element_ty
    if x_scale is None:
        sums = sums * 9223372036854775808.0  # 2 ** 63
    else:
        SUMS: gl.constexpr = sums.type.layout
        place, real = places(first, count, SLOTS, gl.SliceLayout(0, SUMS))
        source, _ = ends(lists, first_row, place, real, CHOSEN, UP)
        row = gl.arange(0, num_warps * 16, layout=gl.SliceLayout(1, SUMS))
        byte = gl.load(largest + _row_of(tile + row // 16, row % 16 // 8, row % 8, M, UP))
        power = gl.maximum(byte.to(gl.int32) - 6, 0) << 23
        sums = sums * power.to(gl.float32, bitcast=True)[:, None]
        sums = sums * gl.load(x_scale + source, mask=real, other=0.0)[None, :]
    if ACTIVATED:
        halves = sums.to(act).to(gl.float32).reshape([num_warps, 2, 8, SLOTS])
        gate, up = gl.split(gl.permute(halves, (0, 2, 3, 1)))
        done = activate(gate, up, act, BETA, LINEAR_BETA).reshape([num_warps * 8, SLOTS])
    else:
        done = sums
    HEIGHT: gl.constexpr = num_warps * 8 if ACTIVATED else num_warps * 16
    STORE: gl.constexpr = gl.BlockedLayout(
        [8, 1], [HEIGHT // 8, 256 // HEIGHT], [1, num_warps], [0, 1]
    )
    done = gl.convert_layout(done.to(act), STORE)
    place, real = places(first, count, SLOTS, gl.SliceLayout(0, STORE))
    _, row = ends(lists, first_row, place, real, CHOSEN, UP)
    element = tile * (HEIGHT // num_warps) + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, STORE))
    if ACTIVATED and x_scale is None:
        element = column_of(element)  # FC2 reads it as it is
    at = row[None, :] * (M // 2 if ACTIVATED else M) + element[:, None]
    gl.store(out + at, done, mask=real[None, :] & (element >= 0)[:, None])


@gluon.constexpr_function
def slots_before(pieces, piece):
    return sum(pieces[:piece])
