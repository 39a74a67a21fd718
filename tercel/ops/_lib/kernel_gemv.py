"""Products of at most 64 rows with a large weight. What bounds them is the stream of the weight.

    y = x [tokens, K] @ weight [columns, K]^T       fp32 sums; then as `finish` says

- `held` keeps whole rows of the weight in registers, for one token: nothing but the last sum passes
  through shared memory, and there are as many programs as a small weight needs.
- `stream` (kernel_gemv_stream.py, in Gluon) is for a few tokens on tensor cores.
- `wide` is a matrix product for more tokens than a warp can hold, and for what `stream` does not
  take: the weight passes through shared memory, where all tokens read it.
- `combine` adds the parts of a product whose K is divided among programs, in one order.

`held` and `stream` read weights before the grid-dependency wait, which constants allow, so that
under programmatic dependent launch the stream starts while the previous kernel still runs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_gemv_stream import DEPTH, stream

COUNTS = ("tokens", "columns", "sigmoid_from")
"""One build serves every value of these."""
HELD_DEPTH = 8192
FEW_TOKENS = 8
NARROW, DEEP = 1024, 4096
"""At most so many columns and at least such a depth: too few programs without dividing K."""
SPLITS = (1, 2, 4, 7, 14)
ENOUGH = 90
"""Programs of `wide` that keep the memory busy."""
SMS = 132
CHAIN = 1024
"""Terms that `wide` adds one after the other where the sum is not rounded to 8 or 11 bits: tensor
cores cut off what does not fit, and a long chain of fp32 sums loses too much."""
BLOCK = 512
"""Elements that a program of `combine` adds."""
TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


class Config(NamedTuple):
    """How a call is cut into programs."""

    kernel: str
    """held, stream or wide."""
    rows: int
    """Rows of weight per program."""
    warps: int
    ahead: int = 0
    """Tiles of weight in flight: of a warp in `stream`, of a program in `wide`."""
    near: int = 0
    """Tiles of x in flight in `stream`."""
    split: int = 1
    """Programs that divide K."""


def choose(tokens: int, columns: int, depth: int, *, streams: bool) -> Config:
    """The configuration of a call of these sizes; `streams` where `stream` takes its dtype.

    Chosen by measurement on an H200 (docs/log.md, 2026-11-30); benchmarks/gemv_configs.py measures
    again.
    """
    wasted = triton.next_power_of_2(depth) - depth
    if tokens == 1 and 1024 <= depth <= HELD_DEPTH and 3 * wasted <= depth:
        return Config("held", rows=2, warps=4)
    narrow = columns <= NARROW and depth >= DEEP and depth % (4 * DEPTH) == 0
    if streams and tokens <= (2 * FEW_TOKENS if narrow else FEW_TOKENS):
        return _stream_config(columns, depth, narrow)
    programs = triton.cdiv(columns, 64) * triton.cdiv(tokens, 64)
    splits = [split for split in SPLITS if depth % (128 * split) == 0] or [1]
    split = next((split for split in splits if programs * split >= ENOUGH), splits[-1])
    # Four tiles of many tokens fill an SM's shared memory: a second program would wait.
    ahead = 3 if tokens > 32 and programs * split > SMS else 4
    return Config("wide", rows=64, warps=4, ahead=ahead, split=split)


def _stream_config(columns: int, depth: int, narrow: bool) -> Config:
    steps = triton.cdiv(depth, DEPTH)
    if narrow:
        return Config("stream", rows=16, warps=4, ahead=7, near=3, split=4)
    if depth >= DEEP and columns <= 16 * 2 * SMS:  # one wave of two programs an SM
        return Config("stream", 16, 8, 4, near=4)
    if depth >= DEEP:
        return Config("stream", 16, 4, 6, near=3)
    warps = next((warps for warps in (1, 2) if steps <= 7 * warps), 4)
    each = triton.cdiv(steps, warps)
    return Config("stream", 16, warps, each, near=3) if each <= 7 else Config("stream", 16, 4, 4, 4)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    sigmoid_from: int | None = None,
    rounded: bool = True,
    dtype: torch.dtype | None = None,
    streams: bool,
) -> torch.Tensor:
    """[tokens, columns] of `dtype`, by default that of x; see `finish` for the other arguments."""
    streams = streams and x.dtype in (torch.bfloat16, torch.float16)
    config = choose(len(x), len(weight), x.shape[1], streams=streams)
    return launch(x, weight, config, sigmoid_from=sigmoid_from, rounded=rounded, dtype=dtype)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: Config,
    *,
    sigmoid_from: int | None = None,
    rounded: bool = True,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`product` in `config`, whichever it is."""
    (tokens, depth), columns = x.shape, len(weight)
    y = torch.empty(tokens, columns, dtype=dtype or x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    gate = columns if sigmoid_from is None else sigmoid_from
    whole = config.split == 1
    into = y if whole else y.new_empty(config.split, tokens, columns, dtype=torch.float32)
    arguments = (x, weight, into, tokens, columns, x.stride(0), gate)
    options = {"K": depth, "ROWS": config.rows, "ROUND": rounded and whole}
    launched = {"num_warps": config.warps, "launch_pdl": True}
    row_programs = triton.cdiv(columns, config.rows)
    span = depth // config.split
    if config.kernel == "held":
        options["WIDTH"] = triton.next_power_of_2(depth)
        held[(row_programs,)](*arguments, **options, **launched)
    elif config.kernel == "stream":
        width = 8 if tokens <= 8 else 16
        flight = {"DEPTH": DEPTH, "AHEAD": config.ahead, "NEAR": config.near}
        grid = (triton.cdiv(tokens, width), row_programs, config.split)
        stream[grid](*arguments, SPAN=span, TOKENS=width, **flight, **options, **launched)
    else:
        width = min(max(triton.next_power_of_2(tokens), 16), 64)
        chain = span if rounded and x.element_size() == 2 else CHAIN
        tile = {"TOKENS": width, "DEPTH": 256 // x.element_size(), "STAGES": config.ahead}
        grid = (triton.cdiv(tokens, width), row_programs, config.split)
        wide[grid](*arguments, SPAN=span, CHAIN=chain, **tile, **options, **launched)
    if not whole:
        combine[(triton.cdiv(y.numel(), BLOCK),)](
            into,
            y,
            y.numel(),
            columns,
            gate,
            PARTS=config.split,
            BLOCK=BLOCK,
            ROUND=rounded,
            dtype=TYPES[x.dtype],
            num_warps=4,
            launch_pdl=True,
        )
    return y


@triton.jit
def finish(sums, is_gate, ROUND: tl.constexpr, dtype: tl.constexpr):
    """With ROUND the sums rounded to `dtype`, and the sigmoid of that where `is_gate`; without it
    the sums themselves."""
    if ROUND:
        sums = sums.to(dtype)
        gate = 1 / (1 + tl.exp(-sums.to(tl.float32)))
        sums = tl.where(is_gate, gate.to(dtype), sums)
    return sums


@triton.jit(do_not_specialize=COUNTS)
def held(
    x,  # [tokens, K] act, rows x_stride apart
    weight,  # [columns, K] act
    y,  # [tokens, columns]
    tokens,
    columns,
    x_stride,
    sigmoid_from,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)
    cuda.gdc_launch_dependents()
    here = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    rows = tl.load(here, mask=(row < columns)[:, None] & (k < K)[None, :], other=0.0)
    cuda.gdc_wait()  # x is the previous kernel's
    for token in range(tokens):
        values = tl.load(x + token * x_stride + k, mask=k < K, other=0.0)
        sums = tl.sum(rows.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        result = finish(sums, row >= sigmoid_from, ROUND, x.dtype.element_ty)
        tl.store(y + token * columns + row, result.to(y.dtype.element_ty), mask=row < columns)


@triton.jit(do_not_specialize=COUNTS)
def wide(
    x,  # [tokens, K] act, rows x_stride apart
    weight,  # [columns, K] act
    y,  # [tokens, columns]; [parts, tokens, columns] fp32 sums where SPAN < K
    tokens,
    columns,
    x_stride,
    sigmoid_from,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    CHAIN: tl.constexpr,
    ROUND: tl.constexpr,
):
    # Programs of the same rows are neighbours: the second reads the weight from L2.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    k = tl.arange(0, DEPTH)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    # Rows past the end repeat the last: a mask would cost registers on every load.
    w = weight + tl.minimum(row, columns - 1).to(tl.int64)[:, None] * K + k[None, :] + part * SPAN
    xs = x + tl.minimum(token, tokens - 1)[None, :] * x_stride + k[:, None] + part * SPAN
    if CHAIN >= SPAN:
        sums = _chain(w, xs, k, 0, SPAN, SPAN, ROWS, TOKENS, DEPTH, STAGES)
    else:
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        for first in tl.range(0, SPAN, CHAIN):
            last = tl.minimum(first + CHAIN, SPAN)
            sums += _chain(w, xs, k, first, last, SPAN, ROWS, TOKENS, DEPTH, STAGES)
    result = finish(sums, (row >= sigmoid_from)[:, None], ROUND, x.dtype.element_ty)
    there = (part.to(tl.int64) * tokens + token[None, :]) * columns + row[:, None]
    mask = (row < columns)[:, None] & (token < tokens)[None, :]
    tl.store(y + there, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _chain(
    w,
    xs,
    k,
    first,
    last,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The products of `first` to `last` of SPAN, added one after the other."""
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(first, last, DEPTH, num_stages=STAGES):
        if SPAN % DEPTH == 0:
            left, right = tl.load(w + start), tl.load(xs + start)
        else:
            left = tl.load(w + start, mask=(k < SPAN - start)[None, :], other=0.0)
            right = tl.load(xs + start, mask=(k < SPAN - start)[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=("sigmoid_from",))
def combine(
    sums,  # [PARTS, size] fp32
    y,  # [size], rows of `columns`
    size,
    columns,
    sigmoid_from,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
    dtype: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + part * size + at, mask=at < size, other=0.0)
    result = finish(total, at % columns >= sigmoid_from, ROUND, dtype)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=at < size)
