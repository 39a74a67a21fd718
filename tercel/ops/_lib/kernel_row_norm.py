"""RMSNorm of rows, and what comes before it in the same pass: a gather from a table, a residual.

One program per row. The weight is read before the grid-dependency wait, the rows after it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

VALUES_PER_WARP = 512
MAX_WARPS = 16


def row_norm(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    ids: torch.Tensor | None = None,
    first_id: int = 0,
    residual: torch.Tensor | None = None,
    copies: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor | None:
    """One launch over rows [T, N], or over rows [V, N] at ids [T] - first_id, zeros where the table
    has no such row. With a residual [T, N] the rounded sum is what is normalised.

    Returns:
        [T, N] normed; None without a weight. `copies` [T, N] receive the rows before the norm.
    """
    tokens, width = len(rows) if ids is None else len(ids), rows.shape[1]
    normed = None if weight is None else rows.new_empty(tokens, width)
    span = triton.next_power_of_2(width)
    if tokens:
        _row_norm[(tokens,)](
            rows,
            ids,
            residual,
            weight,
            normed,
            *copies,
            len(rows),
            first_id,
            rows.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            N=width,
            WIDTH=span,
            num_warps=min(max(span // VALUES_PER_WARP, 1), MAX_WARPS),
            launch_pdl=True,
        )
    return normed


@triton.jit(do_not_specialize=("table_rows", "first_id"))
def _row_norm(
    rows,  # [T, N] or [table_rows, N] act, stride apart
    ids,  # [T] i64, or None: row t is token t's
    residual,  # [T, N] act, residual_stride apart, or None
    weight,  # [N] act, or None: no norm
    normed,  # [T, N] act, or None
    first_copy,  # [T, N] act, or None
    second_copy,  # [T, N] act, or None
    table_rows,
    first_id,
    stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, WIDTH)
    inside = n < N
    cuda.gdc_launch_dependents()
    if weight is not None:
        gain = tl.load(weight + n, mask=inside, other=0.0)
    cuda.gdc_wait()  # rows and ids are the previous kernel's
    if ids is None:
        value = tl.load(rows + token * stride + n, mask=inside, other=0.0)
    else:
        row = tl.load(ids + token) - first_id
        length = tl.where((row >= 0) & (row < table_rows), N, 0)
        value = tl.load(rows + row * stride + n, mask=n < length, other=0.0)
    if residual is not None:
        before = tl.load(residual + token * residual_stride + n, mask=inside, other=0.0)
        value = (before.to(tl.float32) + value.to(tl.float32)).to(value.dtype)
    if first_copy is not None:
        tl.store(first_copy + token * N + n, value, mask=inside)
    if second_copy is not None:
        tl.store(second_copy + token * N + n, value, mask=inside)
    if weight is not None:
        wide = value.to(tl.float32)
        unit = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)).to(value.dtype)
        result = (unit.to(tl.float32) * gain.to(tl.float32)).to(value.dtype)
        tl.store(normed + token * N + n, result, mask=inside)
