"""Lines of memory fetched into L2 before they are read, which a kernel may do before its
grid-dependency wait whoever writes them: L2 is where all programs meet."""

import torch
import triton
import triton.language as tl

LINE = tl.constexpr(128)
"""Bytes that one pointer fetches."""


def can_prefetch(x: torch.Tensor) -> bool:
    """Whether a kernel on `x` knows the instruction; the interpreter does not."""
    return x.device.type != "cpu"


@triton.jit
def prefetch(pointers):
    """Fetches the line of each of `pointers`, valid addresses all."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
