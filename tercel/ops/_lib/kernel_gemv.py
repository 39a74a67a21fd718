"""Products of at most 64 rows with a large weight. What bounds them is the stream of the weight.

    y = epilogue(x [tokens, K] @ weight [columns, K]^T)       fp32 sums; see `Epilogue`

- `held` keeps whole rows of the weight in registers, for one token: nothing but the last sum passes
  through shared memory, and there are as many programs as a small weight needs.
- `ring` (kernel_gemv_ring.py, in Gluon) is for up to 16 tokens on tensor cores: one program on a
  multiprocessor, whose shared memory is full of weight on its way.
- `stream` (kernel_gemv_stream.py, in Gluon) is for a few tokens on tensor cores where the weight is
  small: it goes from memory into registers.
- `wide` is a matrix product for more tokens than those hold, and for what they do not take: the
  weight passes through shared memory, where all tokens read it.
- `combine` adds the parts of a product whose K is divided among programs, in one order.

With a gated linear unit the first half of the weight's rows are gates and the second half what they
gate. A program's tile is then half gate rows and half up rows of the same outputs, so that it holds
both factors and the weight keeps its order.

`held`, `ring` and `stream` read weights before the grid-dependency wait, which constants allow, so
that under programmatic dependent launch the stream starts while the previous kernel still runs; the
last two also bring x into the L2 cache. They let the next kernel start at once for the same reason,
but `ring` only where its share of the weight is so small that both fit on a multiprocessor. A gated
linear unit does so after its wait, so that experts behind it may read the ids of a routing before
it (targets/launch_order.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_activation import Activation, activate, activation_options
from tercel.ops._lib.kernel_gemv_ring import ring
from tercel.ops._lib.kernel_gemv_stream import DEPTH, stream
from tercel.ops._lib.kernel_gemv_tile import gated_halves, row_of

COUNTS = ("tokens", "columns", "sigmoid_from")
"""One build serves every value of these."""
HELD_DEPTH = 8192
FEW_TOKENS = 8
NARROW, DEEP = 1024, 4096
"""At most so many columns and at least such a depth: too few programs without dividing K."""
SPLITS = (1, 2, 4, 7, 14)
ENOUGH, ENOUGH_OF_MANY_TOKENS = 90, 80
"""Programs of `wide` that keep the memory busy; the sums of many tokens are costly to divide."""
SMS = 132
CHAIN = 1024
"""Terms that `wide` adds one after the other where the sum is not rounded to 8 or 11 bits: tensor
cores cut off what does not fit, and a long chain of fp32 sums loses too much."""
BLOCK = 128
"""Elements that a program of `combine` adds."""
TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


class Epilogue(NamedTuple):
    """What becomes of the sums."""

    sigmoid_from: int | None = None
    """Columns from here on pass through a sigmoid, which reads the rounded sums."""
    activation: Activation | None = None
    """Of a gated linear unit, whose factors are the rounded sums; y then has half the columns."""
    rounded: bool = True
    """Whether sums are rounded to the dtype of x; without it they are the result."""
    dtype: torch.dtype | None = None
    """Of the result; None: that of x."""


PLAIN = Epilogue()


class Config(NamedTuple):
    """How a call is cut into programs."""

    kernel: str
    """held, ring, stream or wide."""
    rows: int
    """Rows of weight per program; at most, in `ring`."""
    warps: int
    ahead: int = 0
    """Tiles of weight in flight: of a warp in `stream`, of a program in `ring` and `wide`."""
    near: int = 0
    """Tiles of x in flight in `stream`."""
    split: int = 1
    """Programs that divide K."""
    across: int = 1
    """Warps that divide the rows in `ring`; the others divide K."""


def choose(
    tokens: int, columns: int, depth: int, *, streams: bool, rings: bool | None = None
) -> Config:
    """The configuration of a call of these sizes; `streams` where `stream` takes its dtype, `rings`
    where `ring` takes it, by default where `stream` does.

    Chosen by measurement on an H200 (docs/log.md, 2026-12-01); benchmarks/gemv_configs.py measures
    again.
    """
    narrow = columns <= NARROW and depth >= DEEP
    rings = streams if rings is None else rings
    if _fits_held(tokens, columns, depth, other=rings):
        return Config("held", rows=2, warps=4)
    if rings and tokens <= 2 * FEW_TOKENS and not narrow:
        ring = _ring_config(tokens, columns, depth)
        if ring is not None:
            return ring
    if streams and tokens <= FEW_TOKENS:
        return _stream_config(columns, depth, narrow)
    programs = triton.cdiv(columns, 64) * triton.cdiv(tokens, 64)
    splits = [split for split in SPLITS if depth % (128 * split) == 0] or [1]
    enough = ENOUGH if tokens <= 32 else ENOUGH_OF_MANY_TOKENS
    split = next((split for split in splits if programs * split >= enough), splits[-1])
    # Four tiles of many tokens fill an SM's shared memory: a second program would wait.
    ahead = 3 if tokens > 32 and programs * split > SMS else 4
    return Config("wide", rows=64, warps=4, ahead=ahead, split=split)


def _fits_held(tokens: int, columns: int, depth: int, *, other: bool) -> bool:
    """One token whose weight is in registers at once, or so large that a ring makes many turns;
    without any `other` that is quicker, one token."""
    wasted = triton.next_power_of_2(depth) - depth
    if tokens > 1 or not 1024 <= depth <= HELD_DEPTH or 3 * wasted > depth:
        return False
    at_once = 16 * SMS if depth < DEEP else 6 * SMS
    return not other or columns <= at_once or (depth >= DEEP and columns > 64 * SMS)


def _ring_config(tokens: int, columns: int, depth: int) -> Config | None:
    """None where `stream` is quicker, or `wide`."""
    few, rows = tokens <= FEW_TOKENS, 16 if columns <= 16 * SMS else 32
    if depth < 1024:
        return None if few or columns <= 32 * SMS else Config("ring", 64, 8, 4, across=4)
    if depth < DEEP:
        return Config("ring", 16, 4, 6) if rows == 16 else Config("ring", 32, 2, 9 if few else 7)
    if rows == 16:
        return Config("ring", 16, 4, 12)
    if depth > HELD_DEPTH and few:
        return Config("ring", 64, 8, 4, across=2)
    return Config("ring", 32, 4, 9) if few else Config("ring", 32, 8, 8, across=2)


def _stream_config(columns: int, depth: int, narrow: bool) -> Config:
    steps = triton.cdiv(depth, DEPTH)
    if narrow and steps % 7 == 0:
        return Config("stream", 16, 4, 4, near=4, split=7)
    if narrow and steps % 4 == 0:
        return Config("stream", 16, 4, 7, near=3, split=4)
    if depth >= DEEP and columns <= 16 * 2 * SMS:  # one wave of two programs an SM
        return Config("stream", 16, 8, 4, near=4)
    if depth >= DEEP:
        return Config("stream", 16, 4, 6, near=3)
    warps = next((warps for warps in (1, 2) if steps <= 7 * warps), 4)
    each = triton.cdiv(steps, warps)
    if each > 7:
        return Config("stream", 16, 4, 4, near=4)
    return Config("stream", 16, warps, each, near=each if each <= 5 else 3)


def product(
    x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue = PLAIN, *, streams: bool
) -> torch.Tensor:
    """[tokens, columns], half as many with a gated linear unit; `streams` allows `stream`."""
    streams = streams and x.dtype in (torch.bfloat16, torch.float16)
    depth = x.shape[1]
    places = (depth, x.stride(0), x.data_ptr(), weight.data_ptr())
    aligned = all(place % 16 == 0 for place in places)  # as far as Triton tells of arguments
    exact = epilogue.rounded or depth <= 2 * CHAIN
    rings = streams and aligned and exact
    config = choose(len(x), len(weight), depth, streams=streams, rings=rings)
    return launch(x, weight, config, epilogue)


def launch(
    x: torch.Tensor, weight: torch.Tensor, config: Config, epilogue: Epilogue = PLAIN
) -> torch.Tensor:
    """`product` in `config`, whichever it is."""
    tokens, columns = len(x), len(weight)
    glu = epilogue.activation is not None
    outputs = columns // 2 if glu else columns
    y = torch.empty(tokens, outputs, dtype=epilogue.dtype or x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    gate = columns if epilogue.sigmoid_from is None else epilogue.sigmoid_from
    finished = {
        "ROUND": epilogue.rounded,
        "GLU": glu,
        **activation_options(epilogue.activation),
    }
    if config.split == 1:
        _launch(x, weight, y, gate, config, epilogue.rounded, finished)
        return y
    sums = y.new_empty(config.split, tokens, columns, dtype=torch.float32)
    as_they_are = {**finished, "ROUND": False, "GLU": False}
    _launch(x, weight, sums, gate, config, epilogue.rounded, as_they_are)
    combine[(triton.cdiv(y.numel(), BLOCK),)](
        sums,
        y,
        y.numel(),
        outputs,
        gate,
        PARTS=config.split,
        BLOCK=BLOCK,
        dtype=TYPES[x.dtype],
        num_warps=4,
        launch_pdl=True,
        **finished,
    )
    return y


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    gate: int,
    config: Config,
    rounded: bool,
    finished: dict[str, Any],
) -> None:
    """The kernel of `config`; `rounded` says whether its sums are, here or when parts are added."""
    (tokens, depth), columns = x.shape, len(weight)
    arguments = (x, weight, y, tokens, columns, x.stride(0), gate)
    options = {"K": depth, "ROWS": config.rows, **finished}
    launched = {"num_warps": config.warps, "launch_pdl": True}
    row_programs = triton.cdiv(columns, config.rows)
    span = depth // config.split
    if config.kernel == "held":
        options["WIDTH"] = triton.next_power_of_2(depth)
        held[(row_programs,)](*arguments, **options, **launched)
    elif config.kernel == "ring":
        steps = triton.cdiv(depth, DEPTH * config.warps // config.across)
        flying = min(config.ahead, steps)
        is_early = flying == steps and not finished["GLU"]
        flight = {
            "DEPTH": DEPTH,
            "ACROSS": config.across,
            "STAGES": config.ahead + 1,
            "AHEAD": flying if is_early else flying // 2 + 1,
            "EARLY": is_early,
        }
        grid = (SMS * triton.cdiv(columns, SMS * config.rows),)
        ring[grid](*arguments, TOKENS=8 if tokens <= 8 else 16, **flight, **options, **launched)
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


@triton.jit
def finish(
    sums,
    output,
    sigmoid_from,
    ROUND: tl.constexpr,
    GLU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    act: tl.constexpr,
):
    """What an `Epilogue` makes of a tile's sums [rows, tokens]: [outputs, tokens], at columns
    `output` [outputs, 1] of y."""
    if GLU:
        result = gated_halves(sums, act, BETA, LINEAR_BETA)
    elif ROUND:
        product = sums.to(act)
        gate = 1 / (1 + tl.exp(-product.to(tl.float32)))
        result = tl.where(output >= sigmoid_from, gate.to(act), product)
    else:
        result = sums
    return result


@triton.jit(do_not_specialize=COUNTS)
def held(
    x,  # [tokens, K] act, rows x_stride apart
    weight,  # [columns, K] act
    y,  # [tokens, columns], or half as many with GLU
    tokens,
    columns,
    x_stride,
    sigmoid_from,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
    GLU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    act: tl.constexpr = x.dtype.element_ty
    OUTPUTS: tl.constexpr = ROWS // 2 if GLU else ROWS
    first = tl.program_id(0) * OUTPUTS
    row = row_of(first, tl.arange(0, ROWS), columns, ROWS, GLU)
    k = tl.arange(0, WIDTH)
    if not GLU:
        cuda.gdc_launch_dependents()
    here = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    rows = tl.load(here, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    output = (first + tl.arange(0, OUTPUTS))[:, None]
    outputs = columns // 2 if GLU else columns
    cuda.gdc_wait()  # x is the previous kernel's
    if GLU:
        cuda.gdc_launch_dependents()
    for token in range(tokens):
        values = tl.load(x + token * x_stride + k, mask=k < K, other=0.0)
        sums = tl.sum(rows.to(tl.float32) * values.to(tl.float32)[None, :], 1)[:, None]
        result = finish(sums, output, sigmoid_from, ROUND, GLU, BETA, LINEAR_BETA, act)
        there = y + token * outputs + output
        tl.store(there, result.to(y.dtype.element_ty), mask=output < outputs)


@triton.jit(do_not_specialize=COUNTS)
def wide(
    x,  # [tokens, K] act, rows x_stride apart
    weight,  # [columns, K] act
    y,  # [tokens, columns], with GLU half as many; [parts, tokens, columns] fp32 where SPAN < K
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
    GLU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    # Programs of the same rows are neighbours: the second reads the weight from L2.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    OUTPUTS: tl.constexpr = ROWS // 2 if GLU else ROWS
    first = tl.program_id(1) * OUTPUTS
    row = row_of(first, tl.arange(0, ROWS), columns, ROWS, GLU)
    part = tl.program_id(2)
    k = tl.arange(0, DEPTH)
    if not GLU:
        cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    if GLU:
        cuda.gdc_launch_dependents()
    w = weight + row.to(tl.int64)[:, None] * K + k[None, :] + part * SPAN
    xs = x + tl.minimum(token, tokens - 1)[None, :] * x_stride + k[:, None] + part * SPAN
    if CHAIN >= SPAN:
        sums = _chain(w, xs, k, 0, SPAN, SPAN, ROWS, TOKENS, DEPTH, STAGES)
    else:
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in tl.range(0, SPAN, CHAIN):
            end = tl.minimum(start + CHAIN, SPAN)
            sums += _chain(w, xs, k, start, end, SPAN, ROWS, TOKENS, DEPTH, STAGES)
    output = (first + tl.arange(0, OUTPUTS))[:, None]
    outputs = columns // 2 if GLU else columns
    act: tl.constexpr = x.dtype.element_ty
    result = finish(sums, output, sigmoid_from, ROUND, GLU, BETA, LINEAR_BETA, act)
    there = (part.to(tl.int64) * tokens + token[None, :]) * outputs + output
    mask = (output < outputs) & (token < tokens)[None, :]
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
    sums,  # [PARTS, tokens, columns] fp32
    y,  # [size], rows of `outputs`: of `columns`, or half as many with GLU
    size,
    outputs,
    sigmoid_from,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
    GLU: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    dtype: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, output = at < size, at % outputs
    if not GLU:
        cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    if GLU:
        cuda.gdc_launch_dependents()
    if GLU:
        gate = sums + at // outputs * (2 * outputs) + output
        first = _added(gate, real, 2 * size, PARTS, BLOCK).to(dtype).to(tl.float32)
        second = _added(gate + outputs, real, 2 * size, PARTS, BLOCK).to(dtype).to(tl.float32)
        result = activate(first, second, dtype, BETA, LINEAR_BETA)
    else:
        total = _added(sums + at, real, size, PARTS, BLOCK)
        result = finish(total, output, sigmoid_from, ROUND, False, BETA, LINEAR_BETA, dtype)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=real)


@triton.jit
def _added(here, real, apart, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of all parts, which lie `apart`, in order."""
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(here + part * apart, mask=real, other=0.0)
    return total
