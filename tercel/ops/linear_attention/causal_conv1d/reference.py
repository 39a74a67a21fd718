"""Depthwise causal convolution and SiLU in at least fp32, a sequence at a time."""

from itertools import pairwise

import torch
import torch.nn.functional as F


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    cu_seqlens: tuple[int, ...],
    fresh: tuple[bool, ...],
) -> torch.Tensor:
    past = weight.shape[1] - 1
    windows = state[:, :past].index_select(0, slots)
    taps = weight.t().contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        if fresh[row]:
            windows[row].zero_()
        rows = torch.cat((windows[row], x[start:stop]))
        windows[row] = rows[stop - start :]
        y[start:stop] = convolve(rows, taps)
    state[:, :past].index_copy_(0, slots, windows)
    return y


def convolve(rows: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """[..., W - 1 + L, C] raw rows and [W, C] taps -> [..., L, C] in the dtype of taps."""
    count = rows.shape[-2] - taps.shape[0] + 1
    total = rows.narrow(-2, 0, count) * taps[0]
    for tap in range(1, taps.shape[0]):
        total.addcmul_(rows.narrow(-2, tap, count), taps[tap])
    return F.silu(total)
