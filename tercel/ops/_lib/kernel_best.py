"""The best of many scores as one integer: the largest, and of equal scores the lowest id."""

import triton
import triton.language as tl

NEVER = tl.constexpr(-0x8000000000000000)
"""Below every score."""


@triton.jit
def word(score, at):
    """i64 of fp32 scores, not NaN, and their i32 ids; never 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # one zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - at)


@triton.jit
def id_of(word):
    return 0x7FFFFFFF - (word & 0xFFFFFFFF)


@triton.jit
def score_of(word):
    """fp32."""
    ordered = (word >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
