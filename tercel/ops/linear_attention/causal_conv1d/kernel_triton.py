"""linear_attention/causal_conv1d, one launch per sequence, whose bounds the host knows: blocks of
tokens times channels.

A block reads each of its rows once per tap, which all but the first find in L1. Only a sequence's
first block reads its window, so that block also replaces it.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_kda import convolve

TOKENS, CHANNELS, WARPS = 16, 256, 8
"""Of a block."""


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    cu_seqlens: tuple[int, ...],
    fresh: tuple[bool, ...],
) -> torch.Tensor:
    channels, width = weight.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        tokens = stop - start
        grid = (triton.cdiv(channels, CHANNELS), triton.cdiv(max(tokens, 1), TOKENS))
        _convolve[grid](
            x[start:],
            weight,
            state,
            slots[row:],
            y[start:],
            tokens,
            x.stride(0),
            *weight.stride(),
            state.stride(0),
            channels,
            W=width,
            ROWS=triton.next_power_of_2(max(width - 1, 1)),
            FRESH=fresh[row],
            TOKENS=TOKENS,
            CHANNELS=CHANNELS,
            num_warps=WARPS,
            launch_pdl=True,
        )
    return y


@triton.jit(do_not_specialize=["tokens"])
def _convolve(
    x,  # [tokens, C] act, rows x_stride apart
    weight,  # [C, W]
    state,  # [slots, S, C] act
    slots,  # the sequence's slot, i64
    y,  # [tokens, C] act
    tokens,
    x_stride,
    channel_stride,
    tap_stride,
    window_stride,
    C,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    FRESH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    block = tl.program_id(1)
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = (channel < C)[None, :]
    cuda.gdc_launch_dependents()
    weights = ()
    for tap in tl.static_range(W):
        here = weight + channel * channel_stride + tap * tap_stride
        weights = weights + (tl.load(here, mask=channel < C, other=0.0),)  # noqa: RUF005
    cuda.gdc_wait()

    window = state + tl.load(slots) * window_stride
    rows = ()
    for tap in tl.static_range(W):
        at = token + (tap - (W - 1))
        rows = rows + (_raw(x, window, at, channel, tokens, C, x_stride, W, FRESH),)  # noqa: RUF005
    there = y + token[:, None] * C + channel[None, :]
    tl.store(there, convolve(rows, weights, W), mask=(token < tokens)[:, None] & is_channel)
    if block == 0:
        end = tl.arange(0, ROWS)
        past = tokens.to(tl.int64) - (W - 1) + end
        last = _raw(x, window, past, channel, tokens, C, x_stride, W, FRESH)
        tl.debug_barrier()  # every thread has its rows of the window before any is replaced
        ending = window + end[:, None] * C + channel[None, :]
        tl.store(ending, last, mask=(end < W - 1)[:, None] & is_channel)


@triton.jit
def _raw(x, window, at, channel, tokens, C, x_stride, W: tl.constexpr, FRESH: tl.constexpr):
    """Raw rows `at` of a sequence: negative ones lie in the window, or are zero."""
    is_channel = (channel < C)[None, :]
    inside = ((at >= 0) & (at < tokens))[:, None] & is_channel
    rows = tl.load(x + at[:, None] * x_stride + channel[None, :], mask=inside, other=0.0)
    if not FRESH:
        before = (at < 0)[:, None] & is_channel
        past = window + (at + (W - 1))[:, None] * C + channel[None, :]
        rows = tl.where(before, tl.load(past, mask=before, other=0.0), rows)
    return rows
