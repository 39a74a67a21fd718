"""norm/add_attn_res_rms_norm, one program per token.

    updated = act(prefix + x)
    scores  = <row * rsqrt(mean(row**2) + res_eps), res_norm * res_proj>    of every row
    mixture = act(softmax(scores) . rows)
    normed  = act(act(mixture * rsqrt(mean(mixture**2) + eps)) * weight)

The snapshots' part of a chunk is one tile, so that a pass has one reduction however many there
are. The second pass finds its rows in L1: 12 rows of 7168 bf16 are 172 KB.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

TILES: tuple[tuple[int, int, int], ...] = ((2, 2048, 8), (4, 1024, 8), (8, 1024, 16), (16, 512, 16))
"""(snapshots at most, elements of a row per chunk, warps)."""


def add_attn_res_rms_norm(
    x: torch.Tensor,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    weight: torch.Tensor,
    *,
    res_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = triton.next_power_of_2(len(bank))
    tile = next((chunk, warps) for most, chunk, warps in TILES if rows <= most)
    return launch(x, prefix, bank, (res_norm, res_proj, weight), (res_eps, eps), tile)


def launch(
    x: torch.Tensor,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    epsilons: tuple[float, float],
    tile: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One launch with a tile of (elements per chunk, warps)."""
    tokens, width = x.shape
    snapshots = len(bank)
    normed, mixture = (x.new_empty(tokens, width) for _ in range(2))
    updated = x if prefix is None else torch.empty_like(normed)
    chunk, warps = tile
    _select[(tokens,)](
        x,
        prefix,
        bank,
        *weights,
        normed,
        updated,
        mixture,
        snapshots,
        x.stride(0),
        0 if prefix is None else prefix.stride(0),
        bank.stride(0),
        bank.stride(1),
        *epsilons,
        N=width,
        ROWS=max(triton.next_power_of_2(snapshots), 1),
        CHUNK=min(chunk, triton.next_power_of_2(width)),
        num_warps=warps,
        launch_pdl=True,
    )
    return normed, updated, mixture


@triton.jit
def _sum(x, prefix, n, N):
    """A chunk of the updated prefix, rounded to act."""
    values = tl.load(x + n, mask=n < N, other=0.0)
    if prefix is not None:
        before = tl.load(prefix + n, mask=n < N, other=0.0)
        values = (before.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def _snapshots(bank, row, n, snapshots, snapshot_stride, N):
    """[ROWS, CHUNK] fp32, zeros past the last snapshot."""
    here = bank + row.to(tl.int64)[:, None] * snapshot_stride + n[None, :]
    inside = (row < snapshots)[:, None] & (n < N)[None, :]
    return tl.load(here, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _select(
    x,  # [T, N] act, rows x_stride apart
    prefix,  # [T, N] act, rows prefix_stride apart, or None
    bank,  # [snapshots, T, N] act, strided
    res_norm,  # [N] act
    res_proj,  # [N] act
    weight,  # [N] act
    normed,  # [T, N] act
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
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    x += token * x_stride
    bank += token * token_stride
    if prefix is not None:
        prefix += token * prefix_stride
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()

    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    dots = tl.zeros((ROWS, CHUNK), tl.float32)
    last_squares = tl.zeros((CHUNK,), tl.float32)
    last_dots = tl.zeros((CHUNK,), tl.float32)
    for start in tl.static_range(0, N, CHUNK):
        n = start + tl.arange(0, CHUNK)
        now = _sum(x, prefix, n, N)
        if prefix is not None:
            tl.store(updated + token * N + n, now, mask=n < N)
        last = now.to(tl.float32)
        values = _snapshots(bank, row, n, snapshots, snapshot_stride, N)
        norm = tl.load(res_norm + n, mask=n < N, other=0.0).to(tl.float32)
        query = norm * tl.load(res_proj + n, mask=n < N, other=0.0).to(tl.float32)
        squares += values * values
        dots += values * query[None, :]
        last_squares += last * last
        last_dots += last * query
    scores = tl.sum(dots, 1) * tl.rsqrt(tl.sum(squares, 1) / N + res_eps)
    scores = tl.where(row < snapshots, scores, float("-inf"))
    last_score = tl.sum(last_dots, 0) * tl.rsqrt(tl.sum(last_squares, 0) / N + res_eps)
    highest = tl.maximum(tl.max(scores, 0), last_score)
    shares = tl.exp(scores - highest)
    last_share = tl.exp(last_score - highest)
    whole = tl.sum(shares, 0) + last_share
    shares = shares / whole
    last_share = last_share / whole

    total = tl.zeros((CHUNK,), tl.float32)
    for start in tl.static_range(0, N, CHUNK):
        n = start + tl.arange(0, CHUNK)
        last = _sum(x, prefix, n, N).to(tl.float32)
        values = _snapshots(bank, row, n, snapshots, snapshot_stride, N)
        mixed = tl.sum(shares[:, None] * values, 0) + last_share * last
        mixed = mixed.to(mixture.dtype.element_ty)
        tl.store(mixture + token * N + n, mixed, mask=n < N)
        total += mixed.to(tl.float32) * mixed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total, 0) / N + eps)

    tl.debug_barrier()  # the mixture's chunks come back to other threads
    for start in tl.static_range(0, N, CHUNK):
        n = start + tl.arange(0, CHUNK)
        mixed = tl.load(mixture + token * N + n, mask=n < N, other=0.0)
        gain = tl.load(weight + n, mask=n < N, other=0.0)
        unit = (mixed.to(tl.float32) * scale).to(mixed.dtype)
        result = (unit.to(tl.float32) * gain.to(tl.float32)).to(mixed.dtype)
        tl.store(normed + token * N + n, result, mask=n < N)
