"""spec/context_kv: one launch; a program multiplies a part of N for a head's keys or values of one
layer and a few tokens.

The weight is what a call costs, and a step has few heads: its programs divide N. Each stores its
sums and counts itself; the last of a head adds them in their order, norms, turns and stores, so
bits repeat and nobody waits for another. Without counters a program has all of N. A program's first
tile of the weight is on its way before the grid-dependency wait; it is a constant.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_meeting import arrive
from tercel.ops._lib.kernel_prefetch import LINE, prefetch_lines
from tercel.ops._lib.kernel_rotary import norm_rotate

PROGRAMS = 560
"""At most so many share the heads. A constant: the number of parts decides bits."""
AT_ONCE = 264
"""Programs that a GPU starts together: their first tiles are worth fetching early."""
FEW_TOKENS = 16
TOKENS = 64
"""Per program, of more."""
SPANS = 384, 1024
"""Of N, that a program has at least: with few tokens, and with more, whose sums are larger."""


class Config(NamedTuple):
    """How a call is cut into programs."""

    tokens: int
    """Per program."""
    step: int
    """Of N, per tile."""
    parts: int
    """Programs that divide N."""
    warps: int
    stages: int
    """Tiles in flight."""
    early: bool
    """Whether the first tiles are fetched before the wait."""


def choose(tokens: int, rows: int, hidden: int, dim: int, element_size: int) -> Config:
    """For `rows` heads of `dim` channels, keys and values of every layer. By measurement on an H200
    (docs/log.md, 2026-12-01)."""
    few = tokens <= FEW_TOKENS
    batch = min(max(triton.next_power_of_2(tokens), 8), TOKENS)
    batches = triton.cdiv(tokens, batch)
    step = (256 if batches == 1 and dim <= 128 else 128) // element_size
    step = max(min(step, triton.next_power_of_2(hidden)), 16)
    parts = min(PROGRAMS // (rows * batches), triton.cdiv(hidden, SPANS[0 if few else 1]))
    tiles = triton.cdiv(hidden, step)
    parts = triton.cdiv(tiles, triton.cdiv(tiles, max(parts, 1)))
    warps = 4 if batches > 1 or (few and dim <= 64) else 8
    stages = (5 if dim <= 64 else 3) if few else 4
    return Config(batch, step, parts, warps, stages, rows * batches * parts <= AT_ONCE)


def context_kv(
    x: torch.Tensor,
    weight: torch.Tensor,
    k_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
    counters: torch.Tensor | None = None,
) -> None:
    layers, _, _, _, heads, dim = pages.shape
    rows = layers * 2 * heads
    config = choose(len(x), rows, x.shape[1], dim, x.element_size())
    if counters is None or counters.numel() < rows * triton.cdiv(len(x), config.tokens):
        config = config._replace(parts=1)
    given = (x, weight, k_norm, inv_freq, positions, pages, slot_mapping, counters)
    launch(*given, config, eps=eps, rope_scale=rope_scale, interleaved=interleaved)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    k_norm: torch.Tensor,
    inv_freq: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    counters: torch.Tensor | None,
    config: Config,
    *,
    eps: float,
    rope_scale: float,
    interleaved: bool,
) -> None:
    """`context_kv` in `config`, whichever it is."""
    layers, count, size, _, heads, dim = pages.shape
    (tokens, hidden), rows = x.shape, layers * 2 * heads
    batches = triton.cdiv(tokens, config.tokens)
    span = triton.cdiv(triton.cdiv(hidden, config.step), config.parts) * config.step
    sums = None
    if config.parts > 1:
        shape = (rows, batches, config.parts, config.tokens, dim)
        sums = x.new_empty(shape, dtype=torch.float32)
    _write_head[(rows, config.parts, batches)](
        x,
        weight,
        k_norm,
        inv_freq,
        positions,
        pages,
        slot_mapping,
        sums,
        counters,
        tokens,
        heads,
        count * size,
        x.stride(0),
        eps,
        rope_scale,
        N=hidden,
        D=dim,
        BATCH=config.tokens,
        STEP=config.step,
        SPAN=span,
        PARTS=config.parts,
        STAGES=config.stages,
        LINES=_lines(x, config, span) if config.early else 0,
        CHAIN=config.step if x.element_size() == 4 else 0,
        INTERLEAVED=interleaved,
        num_warps=config.warps,
        launch_pdl=True,
    )


def _lines(x: torch.Tensor, config: Config, span: int) -> int:
    """Lines of a row of the weight that a program's first tiles take."""
    ahead = min(span, config.step * (config.stages - 1))
    return triton.next_power_of_2(max(ahead * x.element_size() // LINE.value, 1))


@triton.jit(do_not_specialize=["tokens", "heads", "slots"])
def _write_head(
    x,  # [tokens, N] act, rows x_stride apart
    weight,  # [layers * 2 * heads * D, N] act
    k_norm,  # [layers, D] act
    inv_freq,  # [D / 2] f32
    positions,  # [tokens] i64
    pages,  # [layers, slots, 2, heads, D] act
    slot_mapping,  # [tokens] i64
    sums,  # [layers * 2 * heads, batches, PARTS, BATCH, D] f32; None where PARTS is 1
    counters,  # [layers * 2 * heads * batches] i32 zeros
    tokens,
    heads,
    slots,
    x_stride,
    eps,
    rope_scale,
    N: tl.constexpr,
    D: tl.constexpr,
    BATCH: tl.constexpr,
    STEP: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    CHAIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    block = tl.program_id(0)
    layer = (block // (2 * heads)).to(tl.int64)
    which = block % (2 * heads)
    part = tl.program_id(1)
    batch = tl.program_id(2)
    own = tl.arange(0, BATCH)
    token = batch * BATCH + own
    real = token < tokens
    d = tl.arange(0, D)
    k = part * SPAN + tl.arange(0, STEP)
    cuda.gdc_launch_dependents()
    rows = weight + (block * D + d).to(tl.int64)[:, None] * N
    if LINES:
        APART: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
        line = part * SPAN + tl.arange(0, LINES) * APART
        prefetch_lines(rows + tl.minimum(line, N - 1)[None, :])
    norm = tl.load(k_norm + layer * D + d)
    frequency = tl.load(inv_freq + tl.arange(0, D // 2))
    cuda.gdc_wait()
    inputs = x + token.to(tl.int64)[None, :] * x_stride
    position = tl.load(positions + token, mask=real, other=0)
    slot = tl.load(slot_mapping + token, mask=real, other=0)
    total = tl.zeros((D, BATCH), tl.float32)
    for start in tl.range(0, SPAN, STEP, num_stages=STAGES):
        at = start + k
        if N % SPAN == 0:
            w = tl.load(rows + at[None, :])
            tile = tl.load(inputs + at[:, None], mask=real[None, :], other=0.0)
        else:
            w = tl.load(rows + at[None, :], mask=(at < N)[None, :], other=0.0)
            tile = tl.load(inputs + at[:, None], mask=real[None, :] & (at < N)[:, None], other=0.0)
        # CHAIN keeps fp32 products of a tile apart from the sum: one chain would lose too much.
        total += tl.dot(w, tile, input_precision="ieee", max_num_imprecise_acc=CHAIN)
    total = tl.trans(total)
    if PARTS > 1:
        counter = block * tl.num_programs(2) + batch
        mine = sums + counter.to(tl.int64) * PARTS * BATCH * D + own[:, None] * D + d[None, :]
        tl.store(mine + part * BATCH * D, total)
        if arrive(counters + counter) < PARTS - 1:
            return
        tl.store(counters + counter, 0)
        total = tl.load(mine, cache_modifier=".cg")
        for other in tl.static_range(1, PARTS):
            total += tl.load(mine + other * BATCH * D, cache_modifier=".cg")
    y = total.to(x.dtype.element_ty)
    if which < heads:  # keys come first
        turned = norm_rotate(
            y, norm[None, :], frequency, position, eps, rope_scale, BATCH, D, INTERLEAVED
        )
        y = turned.to(y.dtype)
    here = pages + ((layer * slots + slot) * (2 * heads) + which)[:, None] * D + d[None, :]
    tl.store(here, y, mask=real[:, None])
