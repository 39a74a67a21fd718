"""FP8 weights in blocks: e4m3 values, one fp32 scale per 128 x 128 block of a matrix.

The published form keeps the scales in four dimensions, [ceil(R / 128), 1, ceil(C / 128), 1]; edge
blocks are smaller.
Source: NVIDIA Model Optimizer `FP8_PB_WO`, as published in Kimi-K3-NVFP4.
"""

import torch

BLOCK = 128
"""Rows and columns that share a scale."""

MAX_VALUE = 448.0
"""The largest e4m3 value."""


def scale_shape(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Of a matrix's stored scales."""
    return -(-rows // BLOCK), 1, -(-columns // BLOCK), 1


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    rows: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 values of `weight`: each e4m3 value times its block's scale, rounded to fp32.

    Args:
        weight: [..., C] e4m3, the matrix or any part of it.
        scale: as stored, of the whole matrix.
        rows: [...] which row of the matrix each row of `weight` is; None: all, in order.
        columns: [C] likewise.
    """
    rows = torch.arange(weight.shape[0]) if rows is None else rows
    columns = torch.arange(weight.shape[-1]) if columns is None else columns
    blocks = scale.float()[:, 0, :, 0]
    of_rows = blocks[rows // BLOCK]
    return weight.float().mul_(of_rows.index_select(-1, columns // BLOCK))


def quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and stored scales of w [R, C]: a block's largest magnitude becomes 448."""
    rows, columns = w.shape
    high, _, wide, _ = shape = scale_shape(rows, columns)
    padded = torch.zeros(high * BLOCK, wide * BLOCK)
    padded[:rows, :columns] = w
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / MAX_VALUE)
    values = (blocks / scale).clamp_(-MAX_VALUE, MAX_VALUE).to(torch.float8_e4m3fn)
    return values.view_as(padded)[:rows, :columns].contiguous(), scale.view(shape)
