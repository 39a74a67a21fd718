"""The norm of heads and their rotation, on rows that a kernel holds."""

import triton
import triton.language as tl

TURN = tl.constexpr(6.283185307179586)
PER_TURN = tl.constexpr(0.15915494309189535)


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

    weight [ROWS or 1, D], inv_freq [D / 2] fp32 and positions [ROWS] are values. Angles are fp64
    until whole turns are off, products fp32; D is a power of two. A pair turns in the registers
    that hold it.
    """
    HALF: tl.constexpr = D // 2
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / D
    unit = wide * tl.rsqrt(mean + eps)[:, None] * weight.to(tl.float32)
    angle = positions.to(tl.float64)[:, None] * inv_freq.to(tl.float64)[None, :]
    angle -= tl.floor(angle * PER_TURN + 0.5) * TURN
    near = angle.to(tl.float32)
    rest = (angle - near.to(tl.float64)).to(tl.float32)
    cos = (tl.cos(near) - rest * tl.sin(near)) * scale
    sin = (tl.sin(near) + rest * tl.cos(near)) * scale
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(unit, (ROWS, HALF, 2)))
    else:
        first, second = tl.split(tl.permute(tl.reshape(unit, (ROWS, 2, HALF)), (0, 2, 1)))
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    if not INTERLEAVED:
        turned = tl.permute(turned, (0, 2, 1))
    return tl.reshape(turned, (ROWS, D))
