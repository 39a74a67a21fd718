"""Rows as e4m3 with a power of two each, in the order of the columns of a product of experts."""

import torch
import triton
import triton.language as tl

from tercel.ops._lib.kernel_activation import Activation, activate, activation_options
from tercel.ops._lib.kernel_mxfp8 import (
    e4m3_code,
    exponent_byte,
    inverse,
    magnitude,
    power_of_two,
    rounded_to_e4m3,
)
from tercel.ops._lib.kernel_slots import Slots, element_of

ELEMENTS = 4096
"""Of a program, at least."""


def rows_in_e4m3(
    x: torch.Tensor,
    slots: Slots | None = None,
    *,
    four: bool,
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of x [n, K], and of each row the fp32 power of two that multiplies them: the
    smallest that makes none larger than 448. With `slots`, of as many rows as there are.

    Args:
        x: with an activation [n, 2 * K], of which eight gates and eight ups take turns.
        four: four elements next to each other in a column's order, as an e4m3 product wants them;
            else two, as a bf16 product does.
    """
    count, depth = len(x), x.shape[1] // (1 if activation is None else 2)
    codes = torch.empty(count, depth, dtype=torch.uint8, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(depth)
    rows = max(ELEMENTS // padded, 1)
    live = None if slots is None else (slots.first_rows, slots.counts)
    _quantize[(triton.cdiv(count, rows),)](
        x, codes, scales, *(live or (None, None)), count,
        LAST=-1 if slots is None else len(slots.counts) - 1,
        K=depth, PADDED=padded, ROWS=rows, FOUR=four,
        GATED=activation is not None, **activation_options(activation),
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def _quantize(
    x,  # [count, K] act, or [count, 2 * K] that are GATED
    codes,  # [count, K] u8
    scales,  # [count] f32
    first_rows,
    counts,
    count,
    LAST: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    FOUR: tl.constexpr,
    GATED: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    if LAST >= 0:
        count = tl.load(first_rows + LAST) + tl.load(counts + LAST)
    first = tl.program_id(0) * ROWS
    if first < count:
        row = first + tl.arange(0, ROWS)
        column = tl.arange(0, PADDED)
        inside = (row < count)[:, None] & (column < K)[None, :]
        at = row.to(tl.int64)[:, None] * K
        element = (_element_of_four(column) if FOUR else element_of(column))[None, :]
        if GATED:
            own = x + 2 * at + (element + element // 8 * 8)
            gate = tl.load(own, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(own + 8, mask=inside, other=0.0).to(tl.float32)
            act: tl.constexpr = x.dtype.element_ty
            values = activate(gate, up, act, BETA, LINEAR_BETA).to(act).to(tl.float32)
        else:
            values = tl.load(x + at + element, mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(magnitude(values), 1)
        byte = exponent_byte(largest)
        scaled = values * inverse(largest, byte)[:, None]
        rounded = e4m3_code(rounded_to_e4m3(scaled)).to(tl.uint8)
        tl.store(codes + at + column[None, :], rounded, mask=inside)
        tl.store(scales + row, power_of_two(byte), mask=row < count)


@triton.jit
def _element_of_four(column):
    """The element that stands in a column of an e4m3 product, within its group of 32: column
    16 * h + 4 * q + b is element 8 * q + h + (4, 2, 0 or 6 for b = 0 .. 3)."""
    within = column % 32
    b = within % 4
    even = tl.where(b == 3, 6, 4 - 2 * b)
    return column - within + within % 16 // 4 * 8 + even + within // 16
