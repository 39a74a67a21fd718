"""The rows of weight that a program of a few-row product holds, and the gated product of their
sums. Plain Triton, which Gluon kernels call too."""

import triton
import triton.language as tl

from tercel.ops._lib.kernel_activation import activate


@triton.jit
def row_of(first, index, columns, ROWS: tl.constexpr, GLU: tl.constexpr):
    """The row of a weight [columns, K] at `index` of a tile of ROWS whose first output is `first`.
    With GLU the tile's first half are gate rows and its second half the up rows of the same
    outputs. Rows past the end repeat the last: a mask would cost registers on every load."""
    if GLU:
        half: tl.constexpr = ROWS // 2
        output = tl.minimum(first + index % half, columns // 2 - 1)
        row = output + index // half * (columns // 2)
    else:
        row = tl.minimum(first + index, columns - 1)
    return row


@triton.jit
def gated_halves(sums, act: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """[rows / 2, tokens] of `act`: the gated product of the halves of a tile's sums [rows, tokens],
    which are rounded before."""
    rounded = sums.to(act).to(tl.float32)
    halves = tl.reshape(rounded, (2, sums.shape[0] // 2, sums.shape[1]))
    gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
    return activate(gate, up, act, BETA, LINEAR_BETA).to(act)
