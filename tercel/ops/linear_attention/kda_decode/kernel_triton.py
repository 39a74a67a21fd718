"""linear_attention/kda_decode, one program per row and head: the state is read once and written
once, and its bytes are the cost.

    y = act(silu(conv(window | qkv)));  q, k normalised;  decay = exp(log_decay(f))
    S = S * decay;  e = beta * (v - S k);  o = S q + e (k.q);  S = S + e k^T
    out = act(o * rsqrt(mean(o**2) + eps) * o_norm * sigmoid(gate))

A program owns its head's channels of the window and all of the head's state, so that nothing is
shared between programs. It passes over the state in tiles of value channels and asks for a tile
before it works on the one before. Rows whose slot is the sink do nothing.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kda import Tiles, choose_tiles, kernel_numbers, kernel_options
from tercel.ops._lib.kernel_kda import (
    head_channels,
    head_rows,
    head_token,
    head_weights,
    move_window,
    prefetch_window,
    sigmoid,
)
from tercel.ops._lib.kernel_prefetch import prefetch

TILES: tuple[tuple[int, Tiles], ...] = (
    (132, Tiles(tile=64, parts=4, warps=4, prefetch=True)),
    (264, Tiles(tile=64, parts=2, warps=4)),
    (1 << 30, Tiles(tile=32, parts=2, warps=4)),
)
"""By the most programs; benchmarks/kda_configs.py measured
them on an H200, whose 132 multiprocessors hold two programs of the large tiles each."""


def kda_decode(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    slots: torch.Tensor,
    *,
    lower_bound: float | None,
    eps: float,
) -> torch.Tensor:
    tiles = choose_tiles(TILES, slots.shape[0] * recurrent.shape[1], recurrent.shape[2])
    rows, weights = (qkv, gate, f, b), (conv_weight, A_log, dt_bias, o_norm)
    return launch(rows, weights, (conv, recurrent), slots, lower_bound, eps, tiles)


def launch(
    rows: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    pools: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    lower_bound: float | None,
    eps: float,
    tiles: Tiles,
) -> torch.Tensor:
    """One launch with `tiles`, whichever they are."""
    _, heads, v_dim, _ = pools[1].shape
    count = slots.shape[0]
    out = torch.empty(count, heads * v_dim, dtype=rows[0].dtype, device=rows[0].device)
    _decode[(heads, count)](
        *rows,
        *weights,
        *pools,
        slots,
        out,
        *kernel_numbers(rows, weights, pools, lower_bound, eps),
        **kernel_options(weights, pools, lower_bound, tiles),
        PREFETCH=tiles.prefetch,
        launch_pdl=True,
    )
    return out


@triton.jit
def _decode(
    qkv,  # [rows, H * (2K + V)] act; this and the next three with rows strided
    gate,  # [rows, H * V] act
    f,  # [rows, H * K] act
    b,  # [rows, H] act
    conv_weight,  # [H * (2K + V), W]
    A_log,  # [H]
    dt_bias,  # [H * K]
    o_norm,  # [V]
    conv,  # [slots, S, H * (2K + V)] act
    recurrent,  # [slots, H, V, K]
    slots,  # [rows] i64
    out,  # [rows, H * V] act
    qkv_stride,
    gate_stride,
    f_stride,
    b_stride,
    channel_stride,
    tap_stride,
    window_stride,
    lower_bound,
    eps,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BOUNDED: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    C = H * (2 * K + V)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    value = tl.arange(0, V)
    own = head_channels(head, H, K, V)

    cuda.gdc_launch_dependents()
    weights, bias, rate = head_weights(
        conv_weight, A_log, dt_bias, head, own, channel_stride, tap_stride, W
    )
    gain = tl.load(o_norm + value)
    slot = tl.load(slots + row)
    state = recurrent + (slot * H + head) * (V * K)
    window = conv + slot * window_stride
    if PREFETCH:
        prefetch(state, V * K)
        prefetch_window(window, head, H, K, V, C, W - 1)
    cuda.gdc_wait()

    out += row * (H * V) + head * V
    if slot == 0:  # padding
        tl.store(out + value, tl.zeros((V,), out.dtype.element_ty))
        return
    # The small loads first: their arithmetic runs while the state arrives.
    rows = head_rows(window, qkv + row * qkv_stride, own, C, W)
    raw_g = tl.load(f + row * f_stride + own[0])
    raw_beta = tl.load(b + row * b_stride + head)
    opening = tl.load(gate + row * gate_stride + head * V + value).to(tl.float32)
    ahead = _load_tile(state, K, TILE, PARTS, PREFETCH)
    gain *= sigmoid(opening)

    tl.debug_barrier()  # every thread has its rows of the window before any is replaced
    move_window(window, rows, own, C, W)

    q, k, v, g, beta = head_token(
        rows, weights, raw_g, raw_beta, rate, bias, lower_bound, W, BOUNDED
    )
    values = v.to(tl.float32)
    overlap = tl.sum(q * k)
    q, k, decay = (
        _split_keys(q, K, PARTS),
        _split_keys(k, K, PARTS),
        _split_keys(tl.exp(g), K, PARTS),
    )

    squares = tl.zeros((TILE,), tl.float32)
    outputs = ()
    for start in tl.static_range(0, V, TILE):
        tile = ahead * decay
        if start + TILE < V:
            ahead = _load_tile(state + (start + TILE) * K, K, TILE, PARTS, PREFETCH)
        error = beta * (_slice(values, start, TILE) - _over_keys(tile * k))
        o = _over_keys(tile * q) + error * overlap
        _store_tile(state + start * K, tile + error[None, :, None] * k, K, TILE, PARTS)
        squares += o * o
        outputs = outputs + (o,)  # noqa: RUF005
    scale = tl.rsqrt(tl.sum(squares) / V + eps)
    for start in tl.static_range(0, V, TILE):
        result = outputs[start // TILE] * scale * _slice(gain, start, TILE)
        tl.store(out + start + tl.arange(0, TILE), result.to(out.dtype.element_ty))


@triton.jit
def _load_tile(
    state, K: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PREFETCH: tl.constexpr
):
    """[PARTS, TILE, K / PARTS] of a state [V, K]: a thread holds the same keys of every part, which
    leaves fewer lanes to sum over. The lanes of a warp first share a row, then take rows. What
    comes from memory and not from L2 is of no use there once it is replaced."""
    policy: tl.constexpr = "" if PREFETCH else "evict_first"
    tile = tl.load(state + _tile_offsets(K, TILE, PARTS), eviction_policy=policy)
    return tl.reshape(tile, (PARTS, TILE, K // PARTS))


@triton.jit
def _store_tile(state, tile, K: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr):
    """What _load_tile loaded goes back."""
    tile = tl.reshape(tile, (PARTS * TILE, K // PARTS))
    tl.store(state + _tile_offsets(K, TILE, PARTS), tile)


@triton.jit
def _tile_offsets(K: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr):
    line = tl.arange(0, PARTS * TILE)
    start = line % TILE * K + line // TILE * (K // PARTS)
    return start[:, None] + tl.arange(0, K // PARTS)[None, :]


@triton.jit
def _split_keys(x, K: tl.constexpr, PARTS: tl.constexpr):
    """[K] -> [PARTS, 1, K / PARTS], to go with a tile."""
    return tl.reshape(x, (PARTS, K // PARTS))[:, None, :]


@triton.jit
def _over_keys(x):
    """[PARTS, values, K / PARTS] -> [values]: the parts lie in one thread, so they go first."""
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def _slice(x, start: tl.constexpr, SIZE: tl.constexpr):
    """x[start : start + SIZE]."""
    if x.shape[0] == SIZE:
        return x
    return tl.gather(x, start + tl.arange(0, SIZE), 0)
