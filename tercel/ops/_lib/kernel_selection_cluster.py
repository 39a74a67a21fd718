"""The selection of kernel_selection.py by a cluster of blocks per token, each with a part of the
columns of all rows.

A block holds its part of the rows in registers as they came; they are widened for the sums, and
anew for the mixture. What crosses blocks are sums: squares and products of every row before the
mixture, and the mixture's squares before the norm.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import cuda

from tercel.ops._lib import kernel_cluster, kernel_selection
from tercel.ops._lib.kernel_bulk_prefetch import prefetch, touch
from tercel.ops._lib.kernel_cluster import exchange, received, send

FORMS = (
    (1, ((16, 8, 4),)),
    (2, ((16, 8, 4), (48, 4, 4))),
    (4, ((12, 8, 4), (24, 4, 4))),
    (8, ((6, 8, 4), (40, 4, 4), (64, 2, 8))),
    (12, ((16, 8, 4), (32, 4, 4), (64, 2, 8))),
)
"""(snapshots at most, (tokens at most, blocks of a token's cluster, warps of each)), by measurement
on an H200 (docs/log.md, 2026-12-01): the first that hold a call. All blocks run at the same time;
what nothing holds one program scores as fast."""
LEAST_WIDTH = 4096
"""Of rows that are worth a cluster."""
AT_ONCE = 8
"""Snapshots of one tile, whose sums are one reduction; more, which take more registers, are tiles
of half as many."""


def selection(
    row: torch.Tensor,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    epsilons: tuple[float, float],
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """As kernel_selection's, which serves what a cluster serves no better."""
    form = _form(row, prefix, bank)
    if form is None:
        return kernel_selection.selection(row, prefix, bank, weights, epsilons)
    return _clustered(row, prefix, bank, weights, epsilons, form)


def _form(row: torch.Tensor, prefix: torch.Tensor | None, bank: torch.Tensor) -> list[int] | None:
    """Blocks and warps, or None. What is prefetched is of 16 bytes, and lies at such."""
    tokens, width = row.shape
    given = [tensor for tensor in (row, prefix, bank) if tensor is not None]
    aligned = all(
        tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in tensor.stride()[:-1])
        for tensor in given
    )
    fits = row.element_size() == 2 and width >= LEAST_WIDTH
    if not (fits and aligned and len(bank)):
        return None
    forms = next((forms for most, forms in FORMS if len(bank) <= most), ())
    return next(
        (form for most, *form in forms if tokens <= most and width % (8 * form[0]) == 0), None
    )


def _clustered(
    row: torch.Tensor,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    epsilons: tuple[float, float],
    form: list[int],
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    tokens, width = row.shape
    snapshots = len(bank)
    normed = None if weights[2] is None else row.new_empty(tokens, width)
    updated = row if prefix is None else row.new_empty(tokens, width)
    mixture = row.new_empty(tokens, width)
    ctas, warps = form
    columns = width // ctas
    rows = triton.next_power_of_2(snapshots) if snapshots <= AT_ONCE else AT_ONCE // 2
    if tokens:
        _select_cluster[(tokens,)](
            row,
            prefix,
            bank,
            *weights,
            normed,
            updated,
            mixture,
            snapshots,
            row.stride(0),
            0 if prefix is None else prefix.stride(0),
            bank.stride(0),
            bank.stride(1),
            *epsilons,
            N=width,
            COLUMNS=columns,
            WIDTH=triton.next_power_of_2(columns),
            ROWS=rows,
            TILES=triton.cdiv(snapshots, rows),
            CTAS=ctas,
            num_warps=warps,
            num_ctas=ctas,
            launch_pdl=True,
        )
    return normed, updated, mixture


@gluon.constexpr_function
def _tile_layout(rows, warps, ctas):
    """[block, row, column]."""
    blocks = [[1 << bit, 0, 0] for bit in range(ctas.bit_length() - 1)]
    return gl.BlockedLayout([1, rows, 8], [1, 1, 32], [1, 1, warps], [2, 1, 0], cga_layout=blocks)


@gluon.constexpr_function
def _line_layout(warps, ctas):
    """[block, line], a thread each."""
    blocks = [[1 << bit, 0] for bit in range(ctas.bit_length() - 1)]
    return gl.BlockedLayout([1, 1], [1, 32], [1, warps], [1, 0], cga_layout=blocks)


@gluon.jit
def _in(x, layout: gl.constexpr):
    """Where every thread holds all of x, no layout moves any of it."""
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _sums(wide, query, axis: gl.constexpr, layout: gl.constexpr):
    """(squares, products with the query) of a block's part of rows, in one reduction."""
    squares, dots = gl.reduce((wide * wide, wide * query), axis, _both)
    return _in(squares, layout), _in(dots, layout)


@gluon.jit
def _touch_lines(
    row, bank, snapshots, snapshot_stride,
    COLUMNS: gl.constexpr,
    SNAPSHOTS: gl.constexpr,
    CTAS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Every line of a block's part of its token's rows, the last of which is `row`."""
    EACH: gl.constexpr = 128 * 8 // bank.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = (COLUMNS + EACH - 1) // EACH
    LAYOUT: gl.constexpr = _line_layout(num_warps, CTAS)
    block = gl.arange(0, CTAS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    thread = gl.arange(0, 32 * num_warps, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    for start in gl.static_range(0, LINES * (SNAPSHOTS + 1), 32 * num_warps):
        line = start + thread + 0 * block
        slot = line // LINES
        column = block * COLUMNS + line % LINES * EACH
        stored = (bank + slot.to(gl.int64) * snapshot_stride + column).to(gl.int64)
        pointer = gl.where(slot < snapshots, stored, (row + column).to(gl.int64))
        touch(pointer, slot <= snapshots)


@gluon.jit
def _widened(rows):
    """In fp32, anew: the compiler does not keep what an earlier call made, which would take twice
    the registers."""
    code: gl.constexpr = "mov.b32 $0, $1;"
    args = [rows]
    rows = gl.inline_asm_elementwise(code, "=r,r", args, rows.dtype, is_pure=False, pack=2)
    return rows.to(gl.float32)


@gluon.jit(do_not_specialize=("snapshots",))
def _select_cluster(
    x,  # [T, N] act, rows x_stride apart
    prefix,  # [T, N] act, rows prefix_stride apart, or None
    bank,  # [snapshots, T, N] act, strided
    res_norm,  # [N] act
    res_proj,  # [N] act
    weight,  # [N] act, or None: no norm
    normed,  # [T, N] act, or None
    updated,  # [T, N] act; x itself where prefix is None
    mixture,  # [T, N] act
    snapshots,
    x_stride,
    prefix_stride,
    snapshot_stride,
    token_stride,
    res_eps,
    eps,
    N: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    TILES: gl.constexpr,
    CTAS: gl.constexpr,
    num_warps: gl.constexpr,
):
    THREADS: gl.constexpr = 32 * num_warps
    # A multiprocessor has no room for blocks of the next launch beside one of so few, whose threads
    # have twice as much in registers.
    LARGE: gl.constexpr = CTAS == 2
    TILE: gl.constexpr = _tile_layout(ROWS, num_warps, CTAS)
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    BLOCK: gl.constexpr = gl.SliceLayout(1, ROW)
    SCORE: gl.constexpr = gl.SliceLayout(2, TILE)
    token = gl.program_id(0).to(gl.int64)
    block = gl.arange(0, CTAS, layout=BLOCK)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROW))[None, :]
    n = block[:, None] * COLUMNS + column
    inside = (column < COLUMNS) & (block[:, None] >= 0)
    index = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORE))[None, :]
    slot = index + gl.zeros((CTAS, ROWS), gl.int32, layout=SCORE)
    cuda.gdc_launch_dependents()
    BYTES: gl.constexpr = COLUMNS * x.dtype.element_ty.primitive_bitwidth // 8
    start = gl.arange(0, CTAS, layout=gl.SliceLayout(1, SCORE))[:, None] * COLUMNS
    start = bank + token * token_stride + start
    for tile in gl.static_range(TILES):
        at = slot + tile * ROWS
        source = start + at.to(gl.int64) * snapshot_stride
        prefetch(source, gl.where(at < snapshots, at, -1), BYTES)
    prefetch(x + token * x_stride + block * COLUMNS, block * 0 + 30, BYTES)
    if prefix is not None:
        prefetch(prefix + token * prefix_stride + block * COLUMNS, block * 0 + 31, BYTES)
    if not LARGE:
        _touch_lines(
            x + token * x_stride, bank + token * token_stride, snapshots, snapshot_stride,
            COLUMNS, TILES * ROWS, CTAS, num_warps,
        )  # fmt: skip
    query = gl.load(res_norm + n, mask=inside, other=0.0).to(gl.float32)
    query *= gl.load(res_proj + n, mask=inside, other=0.0).to(gl.float32)
    if weight is not None:
        gain = gl.load(weight + n, mask=inside, other=0.0)
    address = exchange(2 * TILES * ROWS + 3, CTAS)
    kernel_cluster.arrive()
    cuda.gdc_wait()  # everything else may be the previous kernel's
    now = gl.load(x + token * x_stride + n, mask=inside, other=0.0)
    if prefix is not None:
        before = gl.load(prefix + token * prefix_stride + n, mask=inside, other=0.0)
    here = bank + token * token_stride + gl.expand_dims(n, 1)
    tiles = ()
    for tile in gl.static_range(TILES):
        at = gl.expand_dims(slot + tile * ROWS, 2)
        there = gl.expand_dims(inside, 1) & (at < snapshots)
        source = here + at.to(gl.int64) * snapshot_stride
        tiles = tiles + (gl.load(source, mask=there, other=0.0),)  # noqa: RUF005
    if prefix is not None:
        now = (before.to(gl.float32) + now.to(gl.float32)).to(now.dtype)
        gl.store(updated + token * N + n, now, mask=inside)

    last = now.to(gl.float32)
    last_slot = block * 0 + 2 * TILES * ROWS
    squares, dots = _sums(last, query, 1, BLOCK)
    kernel_cluster.wait()
    send(address, squares, last_slot, CTAS, THREADS)
    send(address, dots, last_slot + 1, CTAS, THREADS)
    for tile in gl.static_range(TILES):
        at = slot + 2 * tile * ROWS
        wide = _widened(tiles[tile]) if LARGE else tiles[tile].to(gl.float32)
        squares, dots = _sums(wide, gl.expand_dims(query, 1), 2, SCORE)
        send(address, squares, at, CTAS, THREADS)
        send(address, dots, at + ROWS, CTAS, THREADS)
    kernel_cluster.arrive()
    kernel_cluster.wait()
    last_score = received(address, last_slot + 1, CTAS) * gl.rsqrt(
        received(address, last_slot, CTAS) / N + res_eps
    )
    top = last_score
    scores = ()
    for tile in gl.static_range(TILES):
        at = slot + 2 * tile * ROWS
        score = received(address, at + ROWS, CTAS)
        score *= gl.rsqrt(received(address, at, CTAS) / N + res_eps)
        score = gl.where(slot + tile * ROWS < snapshots, score, float("-inf"))
        top = gl.maximum(_in(gl.max(score, 1), BLOCK), top)
        scores = scores + (score,)  # noqa: RUF005
    share = gl.exp(last_score - top)
    whole = share
    mixed = last * share[:, None]
    for tile in gl.static_range(TILES):
        shares = gl.exp(scores[tile] - _in(top, gl.SliceLayout(1, SCORE))[:, None])
        whole += _in(gl.sum(shares, 1), BLOCK)
        mixed += gl.sum(gl.expand_dims(shares, 2) * _widened(tiles[tile]), 1)
    mixed = (mixed / whole[:, None]).to(now.dtype)
    gl.store(mixture + token * N + n, mixed, mask=inside)
    if weight is not None:
        wide = mixed.to(gl.float32)
        send(address, _in(gl.sum(wide * wide, 1), BLOCK), last_slot + 2, CTAS, THREADS)
        kernel_cluster.arrive()
        kernel_cluster.wait()
        square = received(address, last_slot + 2, CTAS) / N
        unit = (wide * gl.rsqrt(square + eps)[:, None]).to(now.dtype)
        result = (unit.to(gl.float32) * gain.to(gl.float32)).to(now.dtype)
        gl.store(normed + token * N + n, result, mask=inside)
