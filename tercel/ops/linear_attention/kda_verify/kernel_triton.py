"""linear_attention/kda_verify, one program per row and head, in three phases:

1. Every token at once: accepted records, and convolution, gate and normalisation of the new tokens,
   as lines of fp32 (query, key, decay, value, beta) in scratch. Then the window moves on and the
   new drafts become the slot's records.
2. The state in tiles of value channels, each read once and written once: accepted records and the
   first token, then the drafts from the tile as it is. Outputs go to the scratch.
3. Every output's gated norm.

A program owns its head's channels in every pool, so that nothing is shared between programs; a
barrier lies between what one thread leaves in memory and what another reads or replaces. Tiles
are those of kda_decode. Rows whose slot is the sink do nothing.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kda import Tiles, choose_tiles, kernel_numbers, kernel_options
from tercel.ops._lib.kernel_kda import (
    delta_rule,
    head_channels,
    head_token,
    head_weights,
    load_keys,
    load_tile,
    over_keys,
    sigmoid,
    store_tile,
)

TILES: tuple[tuple[int, Tiles], ...] = (
    (528, Tiles(tile=128, parts=4, warps=8)),
    (1 << 30, Tiles(tile=64, parts=4, warps=4)),
)
"""By the most programs; benchmarks/kda_configs.py measured
them on an H200."""


def kda_verify(
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
    draft_k: torch.Tensor,
    draft_v: torch.Tensor,
    draft_g: torch.Tensor,
    draft_beta: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
    *,
    width: int,
    lower_bound: float | None,
    eps: float,
) -> torch.Tensor:
    tiles = choose_tiles(TILES, slots.shape[0] * recurrent.shape[1], recurrent.shape[2])
    rows, weights = (qkv, gate, f, b), (conv_weight, A_log, dt_bias, o_norm)
    pools = (conv, recurrent, draft_k, draft_v, draft_g, draft_beta)
    return launch(rows, weights, pools, (slots, pending), width, lower_bound, eps, tiles)


def launch(
    rows: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    pools: tuple[torch.Tensor, ...],
    indices: tuple[torch.Tensor, torch.Tensor],
    width: int,
    lower_bound: float | None,
    eps: float,
    tiles: Tiles,
) -> torch.Tensor:
    """One launch with `tiles`, whichever they are."""
    recurrent, draft_k = pools[1:3]
    _, heads, v_dim, k_dim = recurrent.shape
    count, drafts = indices[0].shape[0], draft_k.shape[1]
    out = torch.empty_like(rows[1], memory_format=torch.contiguous_format)
    line = 3 * k_dim + 2 * v_dim + 4  # a line's last part is beta, padded to 16 bytes
    scratch = torch.empty(
        count, heads, drafts + width, line, dtype=torch.float32, device=out.device
    )
    _verify[(heads, count)](
        *rows,
        *weights,
        *pools,
        *indices,
        out,
        scratch,
        *kernel_numbers(rows, weights, pools, lower_bound, eps),
        **kernel_options(weights, pools, lower_bound, tiles),
        D=drafts,
        DRAFTS=triton.next_power_of_2(max(drafts, 1)),
        WIDTH=width,
        TOKENS=triton.next_power_of_2(width),
        LINE=line,
        launch_pdl=True,
    )
    return out


@triton.jit
def _head_rows(window, qkv, token, own, pending, C, qkv_stride, W: tl.constexpr, WIDTH):
    """W raw rows of every token for a head's query, key and value."""
    return (
        _rows(window, qkv, token, own[0], pending, C, qkv_stride, W, WIDTH),
        _rows(window, qkv, token, own[1], pending, C, qkv_stride, W, WIDTH),
        _rows(window, qkv, token, own[2], pending, C, qkv_stride, W, WIDTH),
    )


@triton.jit
def _rows(window, qkv, token, channel, pending, C, qkv_stride, W: tl.constexpr, WIDTH):
    """[TOKENS, channels] raw rows for every tap, oldest first: of the window, then of qkv."""
    rows = ()
    for tap in tl.static_range(W):
        at = (token + tap)[:, None]
        past = window + (pending + at) * C + channel[None, :]
        new = qkv + (at - (W - 1)) * qkv_stride + channel[None, :]
        here = tl.where(at < W - 1, past, new)
        rows = rows + (tl.load(here, mask=(token < WIDTH)[:, None], other=0.0),)  # noqa: RUF005
    return rows


@triton.jit
def _move_window(window, rows, token, own, C, W: tl.constexpr, WIDTH):
    """The window ends with the first token; the raw drafts follow it."""
    for part in tl.static_range(3):
        channel = own[part]
        is_channel = (channel >= 0)[None, :]
        for tap in tl.static_range(1, W - 1):
            there = window + (token + tap - 1)[:, None] * C + channel[None, :]
            tl.store(there, rows[part][tap], mask=(token == 0)[:, None] & is_channel)
        there = window + (token + W - 2)[:, None] * C + channel[None, :]
        tl.store(there, rows[part][W - 1], mask=(token < WIDTH)[:, None] & is_channel)


@triton.jit
def _verify(
    qkv,  # [rows * WIDTH, H * (2K + V)] act; this and the next three with rows strided
    gate,  # [rows * WIDTH, H * V] act
    f,  # [rows * WIDTH, H * K] act
    b,  # [rows * WIDTH, H] act
    conv_weight,  # [H * (2K + V), W]
    A_log,  # [H]
    dt_bias,  # [H * K]
    o_norm,  # [V]
    conv,  # [slots, W - 1 + D, H * (2K + V)] act
    recurrent,  # [slots, H, V, K]
    draft_k,  # [slots, D, H, K]
    draft_v,  # [slots, D, H, V] act
    draft_g,  # [slots, D, H, K]
    draft_beta,  # [slots, D, H]
    slots,  # [rows] i64
    pending,  # [rows] i64
    out,  # [rows * WIDTH, H * V] act
    scratch,  # [rows, H, D + WIDTH, LINE]: query, key, decay, value, output, beta of a token
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
    D: tl.constexpr,
    DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BOUNDED: tl.constexpr,
    LINE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    C = H * (2 * K + V)
    OUTPUT: tl.constexpr = 3 * K + V
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, K)
    value = tl.arange(0, V)
    token = tl.arange(0, TOKENS)
    is_token = (token < WIDTH)[:, None]
    own = head_channels(head, H, K, V)

    cuda.gdc_launch_dependents()
    weights, bias, rate = head_weights(
        conv_weight, A_log, dt_bias, head, own, channel_stride, tap_stride, W
    )
    slot = tl.load(slots + row)
    cuda.gdc_wait()

    first = row * WIDTH
    there = out + (first + token)[:, None] * (H * V) + (head * V + value)[None, :]
    if slot == 0:  # padding
        tl.store(there, tl.zeros((TOKENS, V), out.dtype.element_ty), mask=is_token)
        return
    accepted = tl.load(pending + row)
    state = recurrent + (slot * H + head) * (V * K)
    ahead = load_tile(state, K, TILE, PARTS)
    scratch += (row * H + head) * ((D + WIDTH) * LINE)

    if D > 0:
        draft = tl.arange(0, DRAFTS)
        is_kept = draft < accepted
        record = (slot * D + draft) * H + head
        kept_k = tl.load(draft_k + record[:, None] * K + key[None, :], is_kept[:, None], other=0.0)
        kept_g = tl.load(draft_g + record[:, None] * K + key[None, :], is_kept[:, None], other=0.0)
        kept_v = tl.load(
            draft_v + record[:, None] * V + value[None, :], is_kept[:, None], other=0.0
        )
        kept_beta = tl.load(draft_beta + record, mask=is_kept, other=0.0)
        line = scratch + draft * LINE
        by_key = line[:, None] + key[None, :]
        tl.store(by_key + K, kept_k.to(tl.float32), mask=is_kept[:, None])
        tl.store(by_key + 2 * K, tl.exp(kept_g), mask=is_kept[:, None])
        by_value = line[:, None] + value[None, :]
        tl.store(by_value + 3 * K, kept_v.to(tl.float32), mask=is_kept[:, None])
        tl.store(line + OUTPUT + V, kept_beta, mask=is_kept)

    window = conv + slot * window_stride
    qkv += first * qkv_stride
    rows = _head_rows(window, qkv, token, own, accepted, C, qkv_stride, W, WIDTH)
    raw_g = f + (first + token)[:, None] * f_stride + own[0][None, :]
    raw_g = tl.load(raw_g, mask=is_token, other=0.0)
    raw_beta = tl.load(b + (first + token) * b_stride + head, mask=token < WIDTH, other=0.0)
    q, k, v, g, beta = head_token(
        rows, weights, raw_g, raw_beta, rate, bias[None, :], lower_bound, W, BOUNDED
    )
    line = scratch + (D + token) * LINE
    by_key = line[:, None] + key[None, :]
    tl.store(by_key, q, mask=is_token)
    tl.store(by_key + K, k, mask=is_token)
    tl.store(by_key + 2 * K, tl.exp(g), mask=is_token)
    by_value = line[:, None] + value[None, :]
    tl.store(by_value + 3 * K, v.to(tl.float32), mask=is_token)
    tl.store(line + OUTPUT + V, beta, mask=token < WIDTH)

    tl.debug_barrier()  # the lines are whole; window and records have been read
    _move_window(window, rows, token, own, C, W, WIDTH)
    if WIDTH > 1:
        is_draft = (token > 0) & (token < WIDTH)
        record = (slot * D + token - 1) * H + head
        by_key = record[:, None] * K + key[None, :]
        by_value = record[:, None] * V + value[None, :]
        tl.store(draft_k + by_key, k.to(draft_k.dtype.element_ty), mask=is_draft[:, None])
        tl.store(draft_g + by_key, g, mask=is_draft[:, None])
        tl.store(draft_v + by_value, v, mask=is_draft[:, None])
        tl.store(draft_beta + record, beta, mask=is_draft)

    for start in range(0, V, TILE):
        tile = ahead
        if start + TILE < V:
            ahead = load_tile(state + (start + TILE) * K, K, TILE, PARTS)
        channels = start + tl.arange(0, TILE)
        for kept in range(0, accepted):
            tile = _take(tile, scratch + kept * LINE, channels, K, V, PARTS)
        tile = _take(tile, scratch + D * LINE, channels, K, V, PARTS)
        store_tile(state + start * K, tile, K, TILE, PARTS)
        o = _read(tile, scratch + D * LINE, K, PARTS)
        tl.store(scratch + D * LINE + OUTPUT + channels, o)
        for unsure in range(D + 1, D + WIDTH):
            tile = _take(tile, scratch + unsure * LINE, channels, K, V, PARTS)
            o = _read(tile, scratch + unsure * LINE, K, PARTS)
            tl.store(scratch + unsure * LINE + OUTPUT + channels, o)

    tl.debug_barrier()  # the outputs come back to other threads
    line = scratch + (D + token) * LINE
    outputs = tl.load(line[:, None] + (OUTPUT + value)[None, :], mask=is_token, other=0.0)
    opening = gate + (first + token)[:, None] * gate_stride + (head * V + value)[None, :]
    opening = tl.load(opening, mask=is_token, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(outputs * outputs, 1) / V + eps)
    gain = tl.load(o_norm + value)[None, :] * sigmoid(opening)
    tl.store(there, (outputs * scale[:, None] * gain).to(out.dtype.element_ty), mask=is_token)


@triton.jit
def _take(tile, line, channels, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr):
    """The tile after the token of a line."""
    k, decay = load_keys(line + K, K, PARTS), load_keys(line + 2 * K, K, PARTS)
    v, beta = tl.load(line + 3 * K + channels), tl.load(line + 3 * K + 2 * V)
    return delta_rule(tile, k, decay, v, beta, PARTS)


@triton.jit
def _read(tile, line, K: tl.constexpr, PARTS: tl.constexpr):
    """The output of the token of a line."""
    return over_keys(tile, load_keys(line, K, PARTS), PARTS)
