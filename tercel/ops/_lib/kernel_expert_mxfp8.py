"""Rows of MXFP8 made wide once, for tokens that are many enough for a launch of its own.

bf16 holds an e4m3 value times a power of two, so that products of wide rows are those of MXFP8. For
tensor cores they are 2 ** 90 too large, as kernel_expert_tiles.py wants them; for sums in fp32
they are fp32 and what they are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.core import mxfp8
from tercel.ops._lib.kernel_expert_tiles import exactly, power_above
from tercel.ops._lib.kernel_mxfp8 import exponent_byte, inverse, magnitude

ELEMENTS = 512
"""Of a program."""


def widened(codes: torch.Tensor, scale: torch.Tensor, *, trigger_early: bool) -> torch.Tensor:
    """Wide rows [T, K] of codes [T, K] and scale [T, K / 32].

    Args:
        trigger_early: the next launch may start before this one has waited for the previous.
    """
    out, options = _result(codes)
    _widen[(len(codes), triton.cdiv(codes.shape[1], ELEMENTS))](
        codes.view(torch.uint8), scale, out, EARLY=trigger_early, **options
    )
    return out


def rounded(
    hidden: torch.Tensor, ids: torch.Tensor, first_expert: int, experts: int
) -> torch.Tensor:
    """hidden fp32 [T * k, K], rounded to MXFP8, as wide rows; those of experts elsewhere are not
    written. The launch before this one must have waited for the writer of the ids before it
    triggered."""
    out, options = _result(hidden)
    _round[(len(hidden), triton.cdiv(hidden.shape[1], ELEMENTS))](
        hidden, ids, out, first_expert, experts, **options
    )
    return out


def _result(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Memory for wide rows, and what the kernels have to know of it."""
    is_exact = exactly(x.new_empty(0, dtype=torch.bfloat16))
    out = torch.empty(x.shape, dtype=torch.float32 if is_exact else torch.bfloat16, device=x.device)
    options = {
        "K": x.shape[1],
        "GROUPS": ELEMENTS // mxfp8.BLOCK,
        "EXPONENT": 0 if is_exact else 90,
    }
    return out, {**options, "num_warps": 4, "launch_pdl": True}


@triton.jit
def _groups(K: tl.constexpr, GROUPS: tl.constexpr):
    """Where a program's groups [GROUPS, 1] are among all, and which of them are real."""
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    return tl.program_id(0).to(tl.int64) * (K // 32) + group, group < K // 32


@triton.jit
def _widen(
    codes,  # [T, K] u8
    scale,  # [T, K / 32] u8
    out,  # [T, K] bf16, or fp32
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPONENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    group, real = _groups(K, GROUPS)
    at = group * 32 + tl.arange(0, 32)[None, :]
    if EARLY:
        cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    if not EARLY:
        cuda.gdc_launch_dependents()
    values = tl.load(codes + at, mask=real, other=0).to(tl.float8e4nv, bitcast=True)
    byte = tl.load(scale + group, mask=real, other=0)
    wide = values.to(tl.float32) * power_above(byte, EXPONENT)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=real)


@triton.jit
def _round(
    hidden,  # [T * CHOSEN, K] f32
    ids,  # [T * CHOSEN] i64
    out,  # [T * CHOSEN, K] bf16, or fp32
    first_expert,
    experts,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPONENT: tl.constexpr,
):
    cuda.gdc_launch_dependents()
    expert = tl.load(ids + tl.program_id(0)) - first_expert
    group, real = _groups(K, GROUPS)
    at = group * 32 + tl.arange(0, 32)[None, :]
    cuda.gdc_wait()
    if (expert >= 0) & (expert < experts):
        values = tl.load(hidden + at, mask=real, other=0.0)
        largest = tl.max(magnitude(values), 1)[:, None]
        byte = exponent_byte(largest)
        codes = (values * inverse(largest, byte)).to(tl.float8e4nv)
        wide = codes.to(tl.float32) * power_above(byte, EXPONENT)
        tl.store(out + at, wide.to(out.dtype.element_ty), mask=real)
