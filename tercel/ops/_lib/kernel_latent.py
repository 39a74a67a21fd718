"""Kernels of MLA queries and cached entries, which several ops launch.

    project   q_b @ act(rms_norm(q))
    absorb    act(w_k[h]^T q_nope) | q_rope per head, and the tokens' entries stored
    append    the entries alone

Weights are read before the grid-dependency wait; they are constants. With few tokens the
projection holds its rows in registers and multiplies without tensor cores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

FEW = 8, 1 << 14
"""Tokens, and tokens times rows of q_b, up to which `_project` multiplies one token at a time."""
BATCH = 16
"""Tokens per program otherwise."""
STORED = 4
"""Tokens per program of `append`."""
E4M3_MAX = tl.constexpr(448.0)


class Rotation(NamedTuple):
    """How the last D channels turn."""

    inv_freq: torch.Tensor
    positions: torch.Tensor
    scale: float
    interleaved: bool


class Store(NamedTuple):
    """Where the tokens' entries go."""

    latent: torch.Tensor
    """[T, L + D] act, rows contiguous."""
    kv_norm: torch.Tensor
    eps: float
    pages: torch.Tensor
    """[PAGES, PS, L + D] act or e4m3."""
    slot_mapping: torch.Tensor | None
    """[T] i64; None: entry t is token t's."""
    page_scale: torch.Tensor | None


def project(q: torch.Tensor, q_norm: torch.Tensor, q_b: torch.Tensor, eps: float) -> torch.Tensor:
    """act(q_b @ rms_norm(q)): [T, len(q_b)]."""
    tokens, depth = q.shape
    columns = len(q_b)
    out = q.new_empty(tokens, columns)
    few = tokens == 1 or (tokens <= FEW[0] and tokens * columns <= FEW[1])
    rows = 8 if few else 16
    grid = (triton.cdiv(columns, rows), tokens if few else triton.cdiv(tokens, BATCH))
    _project[grid](
        q,
        q_norm,
        q_b,
        out,
        tokens,
        columns,
        q.stride(0),
        eps,
        DEPTH=depth,
        WIDTH=triton.next_power_of_2(depth),
        ROWS=rows,
        BATCH=1 if few else BATCH,
        num_warps=4,
        launch_pdl=True,
    )
    return out


def absorb(
    q: torch.Tensor, w_k: torch.Tensor, store: Store, rotation: Rotation | None = None
) -> torch.Tensor:
    """Queries [T, H, L + D] of projected q [T, H * (K + D)]; the entries are stored."""
    tokens = len(q)
    heads, k_dim, rank = w_k.shape
    turned = store.latent.shape[1] - rank
    query = q.new_empty(tokens, heads, rank + turned)
    lanes = max(min(64, triton.next_power_of_2(rank)), 16)
    chunks = triton.cdiv(rank, lanes)
    grid = (chunks + 1, heads, triton.cdiv(tokens, BATCH))
    _absorb[grid](
        q,
        w_k,
        query,
        *_arguments(store),
        *(rotation[:3] if rotation else (None, None, 1.0)),
        tokens,
        heads,
        q.stride(0),
        *w_k.stride(),
        store.latent.stride(0),
        K=k_dim,
        L=rank,
        D=turned,
        K_WIDTH=max(triton.next_power_of_2(k_dim), 16),
        CHUNKS=chunks,
        LANES=lanes,
        BATCH=BATCH,
        INTERLEAVED=bool(rotation and rotation.interleaved),
        num_warps=4,
        launch_pdl=True,
    )
    return query


def append(store: Store) -> None:
    """Each token's entry."""
    rank, tokens = len(store.kv_norm), len(store.latent)
    _append[(triton.cdiv(tokens, STORED),)](
        *_arguments(store),
        tokens,
        store.latent.stride(0),
        L=rank,
        D=store.latent.shape[1] - rank,
        BATCH=STORED,
        num_warps=4,
        launch_pdl=True,
    )


def _arguments(store: Store) -> tuple[object, ...]:
    return (
        store.latent,
        store.kv_norm,
        store.pages,
        store.slot_mapping,
        store.page_scale,
        store.eps,
    )


@triton.jit
def rms_norm(x, weight, eps, N: tl.constexpr):
    """Rows x [..., N'] act, zeros from N on: rounded after the norm and after the weight."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, -1) / N
    unit = (wide * tl.expand_dims(tl.rsqrt(mean + eps), -1)).to(x.dtype)
    return (unit.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["tokens", "columns"])
def _project(
    q,  # [tokens, DEPTH] act, rows q_stride apart
    q_norm,  # [DEPTH] act
    q_b,  # [columns, DEPTH] act
    out,  # [tokens, columns] act
    tokens,
    columns,
    q_stride,
    eps,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    cuda.gdc_launch_dependents()
    here = q_b + row.to(tl.int64)[:, None] * DEPTH
    inside = (row < columns)[:, None]
    if BATCH == 1:
        held = tl.load(here + k[None, :], mask=inside & (k < DEPTH)[None, :], other=0.0)
        norm = tl.load(q_norm + k, mask=k < DEPTH, other=0.0)
        token = tl.program_id(1).to(tl.int64)
        cuda.gdc_wait()
        x = tl.load(q + token * q_stride + k, mask=k < DEPTH, other=0.0)
        x = rms_norm(x[None, :], norm[None, :], eps, DEPTH)
        sums = tl.sum(held.to(tl.float32) * x.to(tl.float32), 1)
        tl.store(out + token * columns + row, sums.to(x.dtype), mask=row < columns)
    else:
        STEP: tl.constexpr = min(WIDTH, 256)
        token = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
        part = tl.arange(0, STEP)
        cuda.gdc_wait()
        there = q + token.to(tl.int64)[:, None] * q_stride
        real = (token < tokens)[:, None]
        squares = tl.zeros((BATCH, STEP), tl.float32)
        for start in range(0, DEPTH, STEP):
            at = start + part
            x = tl.load(there + at[None, :], mask=real & (at < DEPTH)[None, :], other=0.0)
            squares += x.to(tl.float32) * x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, 1) / DEPTH + eps)[:, None]
        sums = tl.zeros((BATCH, ROWS), tl.float32)
        for start in range(0, DEPTH, STEP):
            at = start + part
            x = tl.load(there + at[None, :], mask=real & (at < DEPTH)[None, :], other=0.0)
            norm = tl.load(q_norm + at, mask=at < DEPTH, other=0.0)
            x = (x.to(tl.float32) * scale).to(x.dtype)
            x = (x.to(tl.float32) * norm.to(tl.float32)[None, :]).to(x.dtype)
            w = tl.load(here + at[None, :], mask=inside & (at < DEPTH)[None, :], other=0.0)
            sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
        at = out + token.to(tl.int64)[:, None] * columns + row[None, :]
        tl.store(at, sums.to(out.dtype.element_ty), mask=real & (row < columns)[None, :])


@triton.jit
def _key(
    x,
    token,
    real,
    inv_freq,
    positions,
    scale,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The D channels at pointers x [B, 1] of tokens [B], as they are or turned by the tokens'
    positions: angles in fp64, products in fp32, one rounding."""
    d = tl.arange(0, triton.next_power_of_2(D))
    inside = real[:, None] & (d < D)[None, :]
    own = tl.load(x + d[None, :], mask=inside, other=0.0)
    if inv_freq is not None:
        if INTERLEAVED:
            other = d ^ 1
            pair = d // 2
            first = d % 2 == 0
        else:
            other = (d + D // 2) % D
            pair = d % (D // 2)
            first = d < D // 2
        partner = tl.load(x + other[None, :], mask=inside, other=0.0).to(tl.float32)
        frequency = tl.load(inv_freq + pair, mask=d < D, other=0.0).to(tl.float64)
        position = tl.load(positions + token, mask=real, other=0).to(tl.float64)
        angle = position[:, None] * frequency[None, :]
        cos = (tl.cos(angle) * scale).to(tl.float32)
        sin = (tl.sin(angle) * scale).to(tl.float32)
        turned = own.to(tl.float32) * cos + tl.where(first[None, :], -partner, partner) * sin
        own = turned.to(own.dtype)
    return own


@triton.jit
def _store_entries(
    token,
    real,
    latent,
    kv_norm,
    pages,
    slot_mapping,
    page_scale,
    eps,
    inv_freq,
    positions,
    rope_scale,
    latent_stride,
    L: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The entries of tokens [B]: normed latents, and key parts as they are or turned."""
    lanes = tl.arange(0, triton.next_power_of_2(L))
    d = tl.arange(0, triton.next_power_of_2(D))
    inside = real[:, None] & (lanes < L)[None, :]
    slot = token
    if slot_mapping is not None:
        slot = tl.load(slot_mapping + token, mask=real, other=0)
    x = latent + token[:, None] * latent_stride
    rows = tl.load(x + lanes[None, :], mask=inside, other=0.0)
    norm = tl.load(kv_norm + lanes, mask=lanes < L, other=0.0)
    key = _key(x + L, token, real, inv_freq, positions, rope_scale, D, INTERLEAVED)
    normed = rms_norm(rows, norm[None, :], eps, L)
    if page_scale is not None:
        step = tl.load(page_scale)
        normed = _quantize(normed.to(tl.float32) / step, pages.dtype.element_ty)
        key = _quantize(key.to(tl.float32) / step, pages.dtype.element_ty)
    here = pages + slot[:, None] * (L + D)
    tl.store(here + lanes[None, :], normed, mask=inside)
    tl.store(here + L + d[None, :], key, mask=real[:, None] & (d < D)[None, :])


@triton.jit
def _quantize(x, dtype: tl.constexpr):
    """To e4m3, nearest, ties to even; what is too large becomes the largest, NaN stays."""
    x = tl.where(x > E4M3_MAX, E4M3_MAX, tl.where(x < -E4M3_MAX, -E4M3_MAX, x))
    return x.to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def _append(
    latent,  # [T, L + D] act, rows latent_stride apart
    kv_norm,  # [L] act
    pages,  # [PAGES, PS, L + D] act or e4m3
    slot_mapping,  # [T] i64
    page_scale,  # [1] f32, or None
    eps,
    tokens,
    latent_stride,
    L: tl.constexpr,
    D: tl.constexpr,
    BATCH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BATCH + tl.arange(0, BATCH)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    _store_entries(
        token, token < tokens, latent, kv_norm, pages, slot_mapping, page_scale, eps,
        None, None, 1.0, latent_stride, L, D, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "heads"])
def _absorb(
    q,  # [T, H * (K + D)] act, rows q_stride apart
    w_k,  # [H, K, L] act, strided
    query,  # [T, H, L + D] act
    latent,  # [T, L + D] act, rows latent_stride apart
    kv_norm,  # [L] act
    pages,  # [PAGES, PS, L + D] act or e4m3
    slot_mapping,  # [T] i64, or None
    page_scale,  # [1] f32, or None
    eps,
    inv_freq,  # [D / 2] f32, or None
    positions,  # [T] i64, or None
    rope_scale,
    tokens,
    heads,
    q_stride,
    head_stride,
    k_stride,
    lane_stride,
    latent_stride,
    K: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    K_WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    BATCH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64) * BATCH + tl.arange(0, BATCH)
    real = token < tokens
    k = tl.arange(0, K_WIDTH)
    lanes = chunk * LANES + tl.arange(0, LANES)
    cuda.gdc_launch_dependents()
    here = w_k + head.to(tl.int64) * head_stride + k[:, None] * k_stride
    inside = (k < K)[:, None] & (lanes < L)[None, :]
    w = tl.load(here + lanes[None, :] * lane_stride, mask=inside, other=0.0)
    cuda.gdc_wait()
    x = q + token[:, None] * q_stride + head * (K + D)
    there = query + (token * heads + head)[:, None] * (L + D)
    if chunk == CHUNKS:  # not a part of w_k: the channels that pass by it, and the entries
        d = tl.arange(0, triton.next_power_of_2(D))
        key = _key(x + K, token, real, inv_freq, positions, rope_scale, D, INTERLEAVED)
        tl.store(there + L + d[None, :], key, mask=real[:, None] & (d < D)[None, :])
        if head == 0:
            _store_entries(
                token, real, latent, kv_norm, pages, slot_mapping, page_scale, eps,
                inv_freq, positions, rope_scale, latent_stride, L, D, INTERLEAVED,
            )  # fmt: skip
    else:
        nope = tl.load(x + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
        sums = tl.dot(nope, w, input_precision="ieee")
        mask = real[:, None] & (lanes < L)[None, :]
        tl.store(there + lanes[None, :], sums.to(w.dtype), mask=mask)
