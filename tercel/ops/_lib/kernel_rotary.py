"""The norm of heads and their rotation, on rows that a kernel holds."""

import triton
import triton.language as tl

PER_QUARTER = tl.constexpr(0.6366197723675814)
QUARTER = tl.constexpr(1.5707963267948966)
WHOLE = tl.constexpr(6755399441055744.0)
"""1.5 * 2**52: added to a smaller fp64 number it leaves no fraction."""


@triton.jit
def norm_rotate(
    x,
    weight,
    inv_freq,
    positions,
    eps,
    scale,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """rope(x / rms(x) * weight) of rows x [ROWS, D], not rounded: fp32 [ROWS, D].

    weight [ROWS or 1, D], inv_freq [D / 2] fp32 and positions [ROWS] are values; D is a power of
    two.
    """
    cos, sin = turns(inv_freq, positions, scale)
    return norm_turn(x, weight, cos, sin, eps, ROWS, D, INTERLEAVED)


@triton.jit
def turns(inv_freq, positions, scale):
    """(cos, sin) of positions [ROWS] times inv_freq [D / 2], times scale: fp32 [ROWS, D / 2].

    Angles are fp64 until whole quarters of a turn are off. What is left is at most an eighth of a
    turn, where a few terms are exact to an fp32 rounding (Cephes, sinf and cosf).
    """
    quarters = positions.to(tl.float64)[:, None] * inv_freq.to(tl.float64)[None, :] * PER_QUARTER
    shifted = quarters + WHOLE
    which = shifted.to(tl.int64, bitcast=True).to(tl.int32)
    x = ((quarters - (shifted - WHOLE)) * QUARTER).to(tl.float32)
    z = x * x
    sin = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    cos = 1 - z * (
        0.5 - z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    )
    odd = which & 1
    first = tl.where(odd == 1, sin, cos)
    second = tl.where(odd == 1, cos, sin)
    first = tl.where(((which + 1) & 2) == 2, -first, first)
    second = tl.where((which & 2) == 2, -second, second)
    return first * scale, second * scale


@triton.jit
def norm_turn(
    x,
    weight,
    cos,
    sin,
    eps,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """`norm_rotate` by turns cos and sin [ROWS, D / 2]."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / D
    unit = wide * tl.rsqrt(mean + eps)[:, None] * weight.to(tl.float32)
    return turn(unit, cos, sin, ROWS, D, INTERLEAVED)


@triton.jit
def turn(x, cos, sin, ROWS: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows x [ROWS, D] fp32, pair by pair. A pair turns in the registers that hold it."""
    HALF: tl.constexpr = D // 2
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    if not INTERLEAVED:
        turned = tl.permute(turned, (0, 2, 1))
    return tl.reshape(turned, (ROWS, D))
