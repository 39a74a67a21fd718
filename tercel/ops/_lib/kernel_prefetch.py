"""Asking for memory before it may be read."""

import triton
import triton.language as tl

LINE = tl.constexpr(128)
"""Bytes that come at a time."""


@triton.jit
def prefetch(start, COUNT: tl.constexpr):
    """The lines of COUNT elements from `start` on into L2, which holds what every launch has
    stored: unlike a load, whose registers keep what was there, this is right before the wait for a
    launch that writes them, and the loads after the wait find them near."""
    size: tl.constexpr = COUNT * start.dtype.element_ty.primitive_bitwidth // 8
    prefetch_lines(start.to(tl.int64) + tl.arange(0, (size + LINE - 1) // LINE) * LINE)


@triton.jit
def prefetch_lines(pointers):
    """The same for the line of each of a tensor of addresses."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers],
        tl.int32,
        is_pure=False,
        pack=1,
    )
