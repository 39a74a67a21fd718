"""MXFP8 and powers of two in kernels; see tercel/core/mxfp8.py."""

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """The bits of |x| in fp32, which order as magnitudes do, with NaN above all."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_byte(largest):
    """The scale byte of a block from its largest magnitude: ceil(log2(largest / 448)) + 127.

    448 = 1.75 * 2 ** 8: what exceeds 1.75 in its mantissa carries into the exponent.
    """
    byte = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 0)
    return tl.where(largest < 0x7F800000, byte, 0)


@triton.jit
def inverse(largest, byte):
    """2 ** (127 - byte) as fp32, and not a number where the block's largest is not finite."""
    return tl.where(largest < 0x7F800000, power_of_two(254 - byte), float("nan"))


@triton.jit
def rounded_to_e4m3(x):
    """fp32 x of at most 448 to the nearest value of e4m3, ties to even, still fp32."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    fixed = (x + 24576.0) - 24576.0  # below 2 ** -6 all steps are 2 ** -9
    return tl.where(tl.abs(x) < 0.015625, fixed, near.to(tl.float32, bitcast=True))


@triton.jit
def e4m3_code(x):
    """The code, i32, of a value that e4m3 holds: a cast that also the interpreter gets right."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> 20) - (120 << 3)
    code = tl.where(magnitude < 0x3C800000, (tl.abs(x) * 512).to(tl.int32), normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return code | (bits >> 24) & 0x80


@triton.jit
def power_of_two(byte):
    """2 ** (byte - 127), fp32; 0 for the byte 0 and infinite for 255."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
