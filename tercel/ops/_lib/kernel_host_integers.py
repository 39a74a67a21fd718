"""Host integers on the device, by way of launch arguments.

A copy from pageable host memory waits for the device and cannot be captured into a graph; arguments
of a launch do neither, and a captured graph keeps them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

WIDTH = 16
"""Integers per launch."""
NAMES = tuple(f"v{index}" for index in range(WIDTH))


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """[len(values)] int32."""
    out = torch.empty(len(values), dtype=torch.int32, device=device)
    for start in range(0, len(values), WIDTH):
        part = tuple(values[start : start + WIDTH])
        padded = part + (0,) * (WIDTH - len(part))
        _put[(1,)](out, start, len(part), *padded, num_warps=1, launch_pdl=True)
    return out


@triton.jit(do_not_specialize=("start", "count", *NAMES))
def _put(
    out,  # [*] i32
    start,
    count,
    v0,
    v1,
    v2,
    v3,
    v4,
    v5,
    v6,
    v7,
    v8,
    v9,
    v10,
    v11,
    v12,
    v13,
    v14,
    v15,
):
    i = tl.arange(0, 16)
    low = tl.where(i < 2, tl.where(i == 0, v0, v1), tl.where(i == 2, v2, v3))
    low = tl.where(i < 4, low, tl.where(i < 6, tl.where(i == 4, v4, v5), tl.where(i == 6, v6, v7)))
    high = tl.where(i < 10, tl.where(i == 8, v8, v9), tl.where(i == 10, v10, v11))
    end = tl.where(i < 14, tl.where(i == 12, v12, v13), tl.where(i == 14, v14, v15))
    high = tl.where(i < 12, high, end)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()  # out may be memory that the previous kernel still reads
    tl.store(out + start + i, tl.where(i < 8, low, high), mask=i < count)
