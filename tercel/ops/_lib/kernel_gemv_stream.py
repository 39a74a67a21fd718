"""Products of few rows with a large weight as a stream of the weight, on tensor cores without
shared memory.

An m16n8k16 step wants, of 16 rows of weight, pieces of K that lie apart; but which k is which is
free as long as weight and x agree. Operands with eight neighbouring k per thread are therefore
loaded from memory straight into the registers that a step reads, 16 bytes a thread: nothing passes
through shared memory before the last sum, and what is in flight is bounded by registers alone.
Each warp multiplies its own part of K; their sums meet once, in one order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_gemv_tile import gated_halves, row_of

COUNTS = ("tokens", "columns", "sigmoid_from")
"""One build serves every value of these."""
DEPTH = 64
"""Elements of K that a warp multiplies at a time: 128 bytes of every row."""


@gluon.jit(do_not_specialize=COUNTS)
def stream(
    x,  # [tokens, K] bf16 or f16, rows x_stride apart
    weight,  # [columns, K] as x
    y,  # [tokens, columns], with GLU half as many; [parts, tokens, columns] fp32 where SPAN < K
    tokens,
    columns,
    x_stride,
    sigmoid_from,
    K: gl.constexpr,
    SPAN: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    DEPTH: gl.constexpr,
    AHEAD: gl.constexpr,
    NEAR: gl.constexpr,
    ROUND: gl.constexpr,
    GLU: gl.constexpr,
    BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A program's [ROWS, TOKENS] of the product over SPAN of K: AHEAD tiles of weight are in flight
    before the grid-dependency wait and ever after, NEAR tiles of x after it."""
    STEP: gl.constexpr = num_warps * DEPTH
    STEPS: gl.constexpr = (SPAN + STEP - 1) // STEP
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    if not GLU:
        cuda.gdc_launch_dependents()
    token = gl.program_id(0) * TOKENS
    part = gl.program_id(2)
    OUTPUTS: gl.constexpr = ROWS // 2 if GLU else ROWS
    first = gl.program_id(1) * OUTPUTS
    rows = row_of(first, along(1, ROWS, LEFT), columns, ROWS, GLU) - first
    depth = along(0, num_warps, LEFT) * DEPTH + along(2, DEPTH, LEFT)
    here = rows * K + depth
    w = weight + first.to(gl.int64) * K + part * SPAN
    tiles = ()
    for step in gl.static_range(min(AHEAD, STEPS)):
        tiles = tiles + (_tile(w, here, depth, step, STEP, SPAN),)  # noqa: RUF005
    prefetch(x, tokens, x_stride, K, num_warps)
    count = along(2, TOKENS, RIGHT)
    deep = along(0, num_warps, RIGHT) * DEPTH + along(1, DEPTH, RIGHT)
    there = gl.minimum(count, tokens - 1 - token) * x_stride + deep
    x += token.to(gl.int64) * x_stride + part * SPAN
    cuda.gdc_wait()  # x is the previous kernel's
    if GLU:
        cuda.gdc_launch_dependents()
    sums = gl.zeros((num_warps, ROWS, TOKENS), gl.float32, SUMS)
    values = ()
    for step in gl.static_range(min(NEAR, STEPS)):
        values = values + (_tile(x, there, deep, step, STEP, SPAN),)  # noqa: RUF005
    for step in gl.static_range(STEPS):
        sums = gl.nvidia.ampere.mma_v2(tiles[0], values[0], sums)
        tiles = tiles[1:]
        values = values[1:]
        if step + AHEAD < STEPS:
            tiles = tiles + (_tile(w, here, depth, step + AHEAD, STEP, SPAN),)  # noqa: RUF005
        if step + NEAR < STEPS:
            values = values + (_tile(x, there, deep, step + NEAR, STEP, SPAN),)  # noqa: RUF005
    product = gl.sum(sums, 0)
    last = gl.minimum(first + OUTPUTS, columns // 2 if GLU else columns)
    at = y + (part.to(gl.int64) * tokens + token) * (columns // 2 if GLU else columns)
    act: gl.constexpr = x.dtype.element_ty
    store(
        at, product, first, last, tokens - token, columns, sigmoid_from, act,
        ROUND, GLU, BETA, LINEAR_BETA, num_warps,
    )  # fmt: skip


@gluon.jit
def prefetch(x, tokens, x_stride, K: gl.constexpr, num_warps: gl.constexpr):
    """Has the programs of a launch bring x into the L2 cache, each its share of lines. Allowed
    before the wait for who writes x: all caches but the first are one."""
    LINE: gl.constexpr = 64
    LINES: gl.constexpr = (K + LINE - 1) // LINE
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    ahead = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    program = ahead * gl.num_programs(0) + gl.program_id(0)
    programs = gl.num_programs(0) * gl.num_programs(1) * gl.num_programs(2)
    line = gl.arange(0, 32 * num_warps, layout=THREADS) * programs + program
    token = line // LINES
    wanted = (token < tokens).to(gl.int32)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [x + gl.minimum(token, tokens - 1) * x_stride + line % LINES * LINE, wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store(
    y, sums, first, last, tokens, columns, sigmoid_from, act: gl.constexpr,
    ROUND: gl.constexpr,
    GLU: gl.constexpr,
    BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Ends a tile's sums [rows, tokens] as an `Epilogue` says: outputs `first` to `last` of y."""
    if GLU:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, num_warps], [0, 1])
        result = gl.convert_layout(gated_halves(sums, act, BETA, LINEAR_BETA), LAYOUT)
    else:
        LAYOUT: gl.constexpr = sums.type.layout
        result = sums
    outputs = columns // 2 if GLU else columns
    output = first + gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, LAYOUT))[:, None]
    token = gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if ROUND and not GLU:
        result = result.to(act)
        gate = 1 / (1 + gl.exp(-result.to(gl.float32)))
        result = gl.where(output >= sigmoid_from, gate.to(act), result)
    there = y + token * outputs + output
    gl.store(there, result.to(y.dtype.element_ty), mask=(output < last) & (token < tokens))


@gluon.jit
def along(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0 .. size - 1 along `axis` of a tile of three."""
    if axis == 0:
        inner: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
        return gl.arange(0, size, layout=inner)[:, None][:, :, None]
    elif axis == 1:
        inner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
        return gl.arange(0, size, layout=inner)[None, :][:, :, None]
    else:
        inner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
        return gl.arange(0, size, layout=inner)[None, :][:, None, :]


@gluon.jit
def _tile(base, where, depth, step: gl.constexpr, STEP: gl.constexpr, SPAN: gl.constexpr):
    """The tile of one step; past the end of K, zeros."""
    if (step + 1) * STEP <= SPAN:
        return gl.load(base + (where + step * STEP))
    else:
        return gl.load(base + (where + step * STEP), mask=depth < SPAN - step * STEP, other=0.0)
