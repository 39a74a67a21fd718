"""The selection over attention residuals and what surrounds it, one program per token.

    updated = act(prefix + x)
    scores  = <row * rsqrt(mean(row**2) + res_eps), res_norm * res_proj>    of every row
    mixture = act(softmax(scores) . rows)
    normed  = act(act(mixture * rsqrt(mean(mixture**2) + eps)) * weight)

Rows are read once: a few at a time are scored and join the mixture, which is scaled when a larger
score comes. The next rows are on their way meanwhile.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

FORMS = ((4, 4, 2, 16), (1 << 30, 2, 2, 8))
"""(snapshots at most, snapshots taken at a time, how many times are in flight, warps), chosen by
measurement on an H200: docs/log.md, 2026-11-30."""


def selection(
    row: torch.Tensor,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    epsilons: tuple[float, float],
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """One launch over row [T, N], prefix [T, N] and bank [S, T, N]; weights are res_norm,
    res_proj and that of the norm, epsilons those of the selection and of the norm.

    Returns:
        (normed, updated, mixture) [T, N]. normed is None without a weight; updated is row itself
        without a prefix.
    """
    tokens, width = row.shape
    snapshots = len(bank)
    normed = None if weights[2] is None else row.new_empty(tokens, width)
    updated = row if prefix is None else row.new_empty(tokens, width)
    mixture = row.new_empty(tokens, width)
    most, ahead, warps = next(form for limit, *form in FORMS if snapshots <= limit)
    rows = min(most, triton.next_power_of_2(max(snapshots, 1)))
    span = triton.next_power_of_2(width)
    if tokens:
        _select[(tokens,)](
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
            WIDTH=span,
            ROWS=rows,
            TILES=triton.cdiv(snapshots, rows),
            AHEAD=ahead,
            num_warps=min(warps, max(span // 128, 1)),
            launch_pdl=True,
        )
    return normed, updated, mixture


@triton.jit
def _tile(bank, index: tl.constexpr, n, snapshots, stride, N: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, WIDTH] snapshots, zeros past the last."""
    row = index * ROWS + tl.arange(0, ROWS)
    here = bank + row.to(tl.int64)[:, None] * stride + n[None, :]
    return tl.load(here, mask=(row < snapshots)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def _scores(wide, query, eps, N: tl.constexpr):
    """Of a row [WIDTH] or of rows [ROWS, WIDTH]: both sums in one reduction."""
    axis: tl.constexpr = len(wide.shape) - 1
    squares, dots = tl.split(tl.sum(tl.join(wide * wide, wide * query), axis))
    return dots * tl.rsqrt(squares / N + eps)


@triton.jit(do_not_specialize=("snapshots",))
def _select(
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
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, WIDTH)
    inside = n < N
    cuda.gdc_launch_dependents()
    query = tl.load(res_norm + n, mask=inside, other=0.0).to(tl.float32)
    query *= tl.load(res_proj + n, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        gain = tl.load(weight + n, mask=inside, other=0.0)
    cuda.gdc_wait()  # everything else may be the previous kernel's
    bank += token * token_stride
    now = tl.load(x + token * x_stride + n, mask=inside, other=0.0)
    if prefix is not None:
        before = tl.load(prefix + token * prefix_stride + n, mask=inside, other=0.0)
    tiles = ()
    for index in tl.static_range(min(AHEAD, TILES)):
        tiles = tiles + (_tile(bank, index, n, snapshots, snapshot_stride, N, ROWS),)  # noqa: RUF005
    if prefix is not None:
        now = (before.to(tl.float32) + now.to(tl.float32)).to(now.dtype)
        tl.store(updated + token * N + n, now, mask=inside)

    mixed = now.to(tl.float32)
    highest = _scores(mixed, query, res_eps, N)
    whole = 1.0
    for index in tl.static_range(TILES):
        wide = tiles[0].to(tl.float32)
        tiles = tiles[1:]
        if index + AHEAD < TILES:
            tiles = tiles + (_tile(bank, index + AHEAD, n, snapshots, snapshot_stride, N, ROWS),)  # noqa: RUF005
        real = index * ROWS + tl.arange(0, ROWS) < snapshots
        scores = tl.where(real, _scores(wide, query[None, :], res_eps, N), float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 0))
        shares = tl.exp(scores - top)
        kept = tl.exp(highest - top)
        mixed = mixed * kept + tl.sum(shares[:, None] * wide, 0)
        whole = whole * kept + tl.sum(shares, 0)
        highest = top
    mixed = (mixed / whole).to(now.dtype)
    tl.store(mixture + token * N + n, mixed, mask=inside)
    if weight is not None:
        wide = mixed.to(tl.float32)
        unit = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)).to(now.dtype)
        result = (unit.to(tl.float32) * gain.to(tl.float32)).to(now.dtype)
        tl.store(normed + token * N + n, result, mask=inside)
