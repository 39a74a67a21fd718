"""Parts of every row's context, as a first launch of attention/mla_decode leaves them, to outputs.

    _sum           u = act(a token's parts by their shares of the whole softmax)
    _values        out = act(act(w_v u) * gate); where parts are few, u too

How many parts a row may have follows from shapes alone; how many it has, from its length on the
device. They are merged in their order, so bits repeat.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_prefetch import prefetch_lines

FUSED_PARTS = 64
"""Up to which one launch merges and multiplies, for a single token."""
FUSED_READS = 3072
"""Heads times parts up to which it does: each of its programs reads all parts of a head."""
SUMMED = 4096
"""Elements of parts that a program of `_sum` holds."""


class Config(NamedTuple):
    """How a first launch is cut into programs."""

    tokens: int
    """Entries per tile; a page holds whole tiles."""
    columns: int
    """Query rows per program."""
    warps: int
    stages: int
    """Tiles in flight."""
    parts: int
    """Most parts of a row."""
    least: int
    """Tiles that a part has at least."""


class Merge(NamedTuple):
    """How parts are merged and multiplied with w_v."""

    fused: bool
    """Whether each program of `_values` merges what it needs, or `_sum` has merged it."""
    tokens: int
    """Tokens per program of `_values`."""
    rows: int
    """Rows of w_v per program."""
    warps: int


def choose_merge(tokens: int, heads: int, parts: int) -> Merge:
    """The configuration for `tokens` tokens of at most `parts` parts."""
    if tokens > 1:
        return Merge(False, 16, 32, 4)
    if heads * parts > FUSED_READS:
        return Merge(False, 1, 8, 2)
    if parts > FUSED_PARTS:
        return Merge(False, 1, 8, 4)
    return Merge(True, 1, 8, 4) if parts <= 32 else Merge(True, 1, 16, 8)


class Where(NamedTuple):
    """What says which parts a row has."""

    context_lens: torch.Tensor
    width: int
    capacity: int
    config: Config


def merge(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    where: Where,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    dtype: torch.dtype,
    config: Merge,
) -> torch.Tensor:
    """The outputs [R * width, H * V] from what `attend` returns."""
    (heads, values, rank), width = w_v.shape, where.width
    tokens = mixed.shape[0] * width
    parts = mixed.shape[1]
    latent = mixed.new_empty(tokens, heads, rank, dtype=dtype)
    out = mixed.new_empty(tokens, heads * values, dtype=dtype)
    sizes = (tokens, heads, width, parts, where.capacity)
    every = max(triton.next_power_of_2(parts), 16)
    options = {
        "PARTS": every,
        "TOKENS": where.config.tokens,
        "LEAST": where.config.least,
        "L": rank,
        "launch_pdl": True,
    }
    if not config.fused:
        lanes = min(max(SUMMED // every, 16), 128, rank)
        grid = (rank // lanes, heads, tokens)
        _sum[grid](
            mixed, weight, where.context_lens, latent, *sizes, LANES=lanes, num_warps=4, **options
        )
    rows = min(config.rows, triton.next_power_of_2(values))
    grid = (triton.cdiv(values, rows), heads, triton.cdiv(tokens, config.tokens))
    _values[grid](
        mixed,
        weight,
        where.context_lens,
        latent,
        w_v,
        gate,
        out,
        *sizes,
        *w_v.stride(),
        0 if gate is None else gate.stride(0),
        V=values,
        ROWS=rows,
        BATCH=config.tokens,
        FUSED=config.fused,
        num_warps=config.warps,
        **options,
    )
    return out


@triton.jit
def live_parts(tiles, parts, LEAST: tl.constexpr):
    """How many of a row's parts have tiles."""
    return tl.minimum(parts, tl.cdiv(tiles, LEAST))


@triton.jit
def _live(context_lens, token, width, parts, capacity, TOKENS: tl.constexpr, LEAST: tl.constexpr):
    """How many parts the row of a token has."""
    context = tl.minimum(tl.load(context_lens + token // width), capacity - width)
    return live_parts(tl.cdiv(context.to(tl.int32) + width, TOKENS), parts, LEAST)


@triton.jit
def _mixture(
    mixed,  # [R, parts, queries, L] f32
    weight,  # [R, parts, queries] f32
    token,
    head,
    lanes,
    live,
    heads,
    width,
    parts,
    PARTS: tl.constexpr,
    L: tl.constexpr,
):
    """The mixed latents of a token's head, in fp32. All parts are read at once."""
    queries = width * heads
    part = tl.arange(0, PARTS)
    row = (token // width).to(tl.int64)
    here = (row * parts + part) * queries + token % width * heads + head
    inside = part < live
    logs = tl.load(weight + here, mask=inside, other=float("-inf"))
    rows = tl.load(mixed + here[:, None] * L + lanes[None, :], mask=inside[:, None], other=0.0)
    shares = tl.exp2(logs - tl.max(logs, 0))
    return tl.sum(rows.to(tl.float32) * (shares / tl.sum(shares, 0))[:, None], 0)


@triton.jit(do_not_specialize=["tokens", "heads", "width", "parts", "capacity"])
def _sum(
    mixed,
    weight,
    context_lens,
    latent,  # [T, H, L] act
    tokens,
    heads,
    width,
    parts,
    capacity,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    L: tl.constexpr,
    LANES: tl.constexpr,
):
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    head = tl.program_id(1)
    token = tl.program_id(2)
    cuda.gdc_launch_dependents()
    live = _live(context_lens, token, width, parts, capacity, TOKENS, LEAST)
    cuda.gdc_wait()
    mix = _mixture(mixed, weight, token, head, lanes, live, heads, width, parts, PARTS, L)
    here = latent + (token.to(tl.int64) * heads + head) * L + lanes
    tl.store(here, mix.to(latent.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens", "heads", "width", "parts", "capacity"])
def _values(
    mixed,
    weight,
    context_lens,
    latent,  # [T, H, L] act
    w_v,  # [H, V, L] act, strided
    gate,  # [T, H * V] act, rows gate_stride apart, or None
    out,  # [T, H * V] act
    tokens,
    heads,
    width,
    parts,
    capacity,
    head_stride,
    value_stride,
    lane_stride,
    gate_stride,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    L: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    FUSED: tl.constexpr,
):
    value = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    token = tl.program_id(2) * BATCH + tl.arange(0, BATCH)
    lanes = tl.arange(0, L)
    cuda.gdc_launch_dependents()
    here = w_v + head.to(tl.int64) * head_stride + value[:, None] * value_stride
    w = tl.load(here + lanes[None, :] * lane_stride, mask=(value < V)[:, None], other=0.0)
    real = (token < tokens)[:, None] & (value < V)[None, :]
    column = head * V + value
    one = tl.program_id(2)
    live = _live(context_lens, one, width, parts, capacity, TOKENS, LEAST) if FUSED else 0
    if gate is not None and BATCH == 1:
        asked = gate + one.to(tl.int64) * gate_stride + head * V + tl.program_id(0) * ROWS
        prefetch_lines(asked.to(tl.int64))
    cuda.gdc_wait()  # w_v is a constant and lengths are a step's inputs; the rest is earlier work's
    if gate is not None:
        at = gate + token.to(tl.int64)[:, None] * gate_stride + column[None, :]
        by = tl.load(at, mask=real, other=0.0)
    if FUSED:
        mix = _mixture(mixed, weight, one, head, lanes, live, heads, width, parts, PARTS, L)
        mix = mix[None, :].to(w.dtype)
    else:
        there = latent + (token.to(tl.int64) * heads + head)[:, None] * L + lanes[None, :]
        mix = tl.load(there, mask=(token < tokens)[:, None], other=0.0)  # [BATCH, L]
    if BATCH == 1:
        o = tl.sum(w.to(tl.float32) * mix.to(tl.float32), 1)[None, :]
    else:
        o = tl.dot(mix, tl.trans(w), input_precision="ieee")
    o = o.to(w.dtype)
    if gate is not None:
        o = (o.to(tl.float32) * by.to(tl.float32)).to(w.dtype)
    tl.store(out + token.to(tl.int64)[:, None] * (heads * V) + column[None, :], o, mask=real)
