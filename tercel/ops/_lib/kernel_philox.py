"""tercel.ops._lib.philox in kernels: the same bits."""

import triton
import triton.language as tl


@triton.jit
def _words(seed, position, stream, block):
    """Four words of the counter (position, stream, block) under the key `seed`."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = (low + key + stream.to(tl.uint32) + block.to(tl.uint32)) * 0
    counter = low + zero, high + zero, stream.to(tl.uint32) + zero, block.to(tl.uint32) + zero
    return tl.philox_impl(
        counter[0], counter[1], counter[2], counter[3], key + zero, key_high + zero, 10
    )


@triton.jit
def uniform(seed, position, stream):
    """fp64 in [0, 1): philox.uniform of i64 seeds and positions, and streams."""
    first, second, _, _ = _words(seed, position, stream, stream * 0)
    bits = ((first >> 5).to(tl.int64) << 26) | (second >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def gumbel(seeds, positions, stream, first, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[ROWS, COUNT] fp64: philox.gumbel of the ids first .. first + COUNT - 1, all fours."""
    block = first // 4 + tl.arange(0, COUNT // 4)
    a, b, c, d = _words(seeds[:, None], positions[:, None], stream, block[None, :])
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COUNT))
    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    return -tl.log(-tl.log(u))
