"""Products of few rows with a large weight, whose tiles pass through a ring of buffers in shared
memory on their way to tensor cores.

What a multiprocessor has in flight is bounded by shared memory, three times of what its registers
hold beside sums and operands, and that decides how much of the weight has come by the time that x
is there. Programs divide the outputs evenly, so that no multiprocessor is left with more than
another. x takes the same way, a tile beside each tile of weight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra import cuda

from tercel.ops._lib.kernel_gemv_stream import COUNTS, along, prefetch, store

copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Triton's name for it since 3.9, and before."""


@gluon.jit(do_not_specialize=COUNTS)
def ring(
    x,  # [tokens, K] bf16 or f16, rows x_stride apart
    weight,  # [columns, K] as x
    y,  # [tokens, columns], with GLU half as many
    tokens,
    columns,
    x_stride,
    sigmoid_from,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    DEPTH: gl.constexpr,
    ACROSS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    ROUND: gl.constexpr,
    GLU: gl.constexpr,
    BETA: gl.constexpr,
    LINEAR_BETA: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A program's part of the outputs, at most ROWS rows of weight. ACROSS warps divide the rows,
    the others K, DEPTH at a time. AHEAD tiles of weight are on their way before the grid-dependency
    wait, STAGES - 1 ever after: copies are waited for in their order, so that the first product,
    which needs x, waits for all that came before. EARLY starts the next launch at once instead of
    after the wait, where both fit on a multiprocessor."""
    ALONG: gl.constexpr = num_warps // ACROSS
    STEP: gl.constexpr = ALONG * DEPTH
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    FLYING: gl.constexpr = min(STAGES - 1, STEPS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [ALONG, ACROSS, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // DEPTH, DEPTH // 8], [ALONG, ACROSS, 1], [2, 1, 0]
    )
    # Eight lanes read 64 bytes of two neighbouring rows at a time, which must not share banks.
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0])
    if EARLY:
        cuda.gdc_launch_dependents()
    outputs = columns // 2 if GLU else columns
    first = gl.program_id(0) * outputs // gl.num_programs(0)
    last = (gl.program_id(0) + 1) * outputs // gl.num_programs(0)
    row = along(1, ROWS, COPY)
    OUTPUTS: gl.constexpr = ROWS // 2 if GLU else ROWS
    live = first + row % OUTPUTS < last
    k = along(0, ALONG, COPY) * DEPTH + along(2, DEPTH, COPY)
    w = weight + first.to(gl.int64) * K
    here = (row % OUTPUTS + row // OUTPUTS * outputs) * K + k
    weights = ()
    values = ()
    for _ in gl.static_range(min(STAGES, STEPS)):
        tile = gl.allocate_shared_memory(x.dtype.element_ty, [ALONG, ROWS, DEPTH], SHARED)
        weights = weights + (tile,)  # noqa: RUF005
        tile = gl.allocate_shared_memory(x.dtype.element_ty, [ALONG, TOKENS, DEPTH], SHARED)
        values = values + (tile,)  # noqa: RUF005
    for step in gl.static_range(AHEAD):
        _fetch(weights[step], w, here, k, live, step * STEP, K)
    prefetch(x, tokens, x_stride, K, num_warps)
    token = along(1, TOKENS, COPY)
    there = token * x_stride + k
    known = token < tokens
    cuda.gdc_wait()  # x is the previous kernel's
    if not EARLY:
        cuda.gdc_launch_dependents()
    for step in gl.static_range(FLYING):
        if step >= AHEAD:
            _fetch(weights[step], w, here, k, live, step * STEP, K)
        _fetch(values[step], x, there, k, known, step * STEP, K)
        async_copy.commit_group()
    sums = gl.zeros((ALONG, ROWS, TOKENS), gl.float32, SUMS)
    for step in gl.static_range(STEPS):
        async_copy.wait_group(FLYING - 1)
        if step + FLYING < STEPS:
            free = weights[(step + FLYING) % STAGES]
            _fetch(free, w, here, k, live, (step + FLYING) * STEP, K)
            free = values[(step + FLYING) % STAGES]
            _fetch(free, x, there, k, known, (step + FLYING) * STEP, K)
        async_copy.commit_group()
        left = weights[step % STAGES].load(LEFT)
        right = values[step % STAGES].permute((0, 2, 1)).load(RIGHT)
        sums = gl.nvidia.ampere.mma_v2(left, right, sums)
    act: gl.constexpr = x.dtype.element_ty
    store(
        y, gl.sum(sums, 0), first, last, tokens, columns, sigmoid_from, act,
        ROUND, GLU, BETA, LINEAR_BETA, num_warps,
    )  # fmt: skip


@gluon.jit
def _fetch(tile, base, where, k, known, start: gl.constexpr, K: gl.constexpr):
    """Starts the copy of a tile at `start` of K; past the end, and where not `known`, zeros."""
    copy_to_shared(tile, base + (where + start), mask=known & (k < K - start))
