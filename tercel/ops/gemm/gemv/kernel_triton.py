"""gemm/gemv as a stream of its weight: what bounds it is the weight's bytes.

    product = act(x [T, K] @ weight [M, K]^T)          fp32 sums
    y       = product, and act(sigmoid(product)) in columns sigmoid_from ..

Both kernels load weights before the grid-dependency wait, which constants allow, so that under
programmatic dependent launch the stream starts while the previous kernel still runs.

- `_gemv_slice` holds a program's whole rows in registers and passes over them once per token:
  no shared memory before the final reduction, and as many programs as a small weight needs. With
  several tokens the compiler keeps the rows in fp32, twice the registers.
- `_gemv_tiles` multiplies on tensor cores; each warp takes its own part of K, so that 16 rows of
  weight feed every warp, and two tiles are in flight before the wait.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


class Config(NamedTuple):
    """How a call is cut into programs."""

    rows: int
    """Rows of weight per program."""
    warps: int
    tokens: int = 0
    """Tokens per program of `_gemv_tiles`; 0: `_gemv_slice`, which takes all."""
    depth: int = 0
    """Elements of K that a warp of `_gemv_tiles` multiplies at a time."""


CONFIGS: tuple[tuple[int, int, int, Config], ...] = (
    (1, 1024, 1 << 30, Config(rows=16, warps=4)),
    (1, 2048, 1 << 30, Config(rows=8, warps=4)),
    (8, 8192, 1024, Config(rows=2, warps=4)),
    (8, 1 << 30, 1 << 30, Config(rows=16, warps=8, tokens=8, depth=128)),
    (1 << 30, 1 << 30, 1 << 30, Config(rows=16, warps=8, tokens=16, depth=128)),
)
"""The first row whose limits on tokens, K and M hold a call decides. Chosen by registers and counts
of programs, not by time: benchmarks/gemv_configs.py measures them on a GPU."""


def choose(tokens: int, depth: int, columns: int) -> Config:
    """The configuration of a call of these sizes."""
    return next(
        config
        for max_tokens, max_depth, max_columns, config in CONFIGS
        if tokens <= max_tokens and depth <= max_depth and columns <= max_columns
    )


def gemv(x: torch.Tensor, weight: torch.Tensor, *, sigmoid_from: int | None = None) -> torch.Tensor:
    config = choose(len(x), x.shape[1], len(weight))
    return launch(x, weight, sigmoid_from, config)


def launch(
    x: torch.Tensor, weight: torch.Tensor, sigmoid_from: int | None, config: Config
) -> torch.Tensor:
    """One launch of `config`, whichever it is."""
    tokens, depth = x.shape
    columns = len(weight)
    y = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    gate = columns if sigmoid_from is None else sigmoid_from
    arguments = (x, weight, y, tokens, columns, x.stride(0), gate)
    options = {"K": depth, "ROWS": config.rows, "num_warps": config.warps, "launch_pdl": True}
    row_programs = triton.cdiv(columns, config.rows)
    if config.tokens == 0:
        width = triton.next_power_of_2(depth)
        _gemv_slice[(row_programs,)](*arguments, WIDTH=width, **options)
    else:
        grid = (triton.cdiv(tokens, config.tokens), row_programs)
        sizes = {"TOKENS": config.tokens, "PARTS": config.warps, "DEPTH": config.depth}
        _gemv_tiles[grid](*arguments, **sizes, **options)
    return y


@triton.jit
def _gate(product, is_gate):
    """The sigmoid of the rounded product where `is_gate`."""
    gate = 1 / (1 + tl.exp(-product.to(tl.float32)))
    return tl.where(is_gate, gate.to(product.dtype), product)


@triton.jit
def _gemv_slice(
    x,  # [tokens, K] act, rows x_stride apart
    weight,  # [columns, K] act
    y,  # [tokens, columns] act
    tokens,
    columns,
    x_stride,
    sigmoid_from,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    cuda.gdc_launch_dependents()
    here = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    held = tl.load(here, mask=(row < columns)[:, None] & (k < K)[None, :], other=0.0)
    cuda.gdc_wait()  # x is the previous kernel's
    for token in range(tokens):
        values = tl.load(x + token * x_stride + k, mask=k < K, other=0.0)
        sums = tl.sum(held.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        product = _gate(sums.to(y.dtype.element_ty), row >= sigmoid_from)
        tl.store(y + token * columns + row, product, mask=row < columns)


@triton.jit
def _gemv_tiles(
    x,  # [tokens, K] act, rows x_stride apart
    weight,  # [columns, K] act
    y,  # [tokens, columns] act
    tokens,
    columns,
    x_stride,
    sigmoid_from,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    STEP: tl.constexpr = PARTS * DEPTH
    # Programs of the same rows are neighbours: the second reads the weight from L2.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = (tl.arange(0, PARTS) * DEPTH)[:, None, None] + tl.arange(0, DEPTH)[None, None, :]
    w = weight + row.to(tl.int64)[None, :, None] * K + k  # [PARTS, ROWS, DEPTH]
    inside = (row < columns)[None, :, None]
    cuda.gdc_launch_dependents()
    tile = tl.load(w, mask=inside & (k < K), other=0.0)
    later = tl.load(w + STEP, mask=inside & (k < K - STEP), other=0.0)
    cuda.gdc_wait()  # x is the previous kernel's
    xs = x + token[None, :, None] * x_stride + k  # [PARTS, TOKENS, DEPTH]
    real = (token < tokens)[None, :, None]
    sums = tl.zeros((PARTS, ROWS, TOKENS), tl.float32)
    for start in tl.static_range(0, K, STEP):
        values = tl.load(xs + start, mask=real & (k < K - start), other=0.0)
        sums = tl.dot(tile, tl.permute(values, (0, 2, 1)), sums)
        tile = later
        ahead = w + (start + 2 * STEP)
        later = tl.load(ahead, mask=inside & (k < K - start - 2 * STEP), other=0.0)
    product = tl.sum(sums, 0).to(y.dtype.element_ty)
    product = _gate(product, (row >= sigmoid_from)[:, None])
    there = y + token[None, :] * columns + row[:, None]
    tl.store(there, product, mask=(row < columns)[:, None] & (token < tokens)[None, :])
