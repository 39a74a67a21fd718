"""spec/context_kv: one launch; a program holds a head's keys or values of one layer for 16 tokens.

The weight is what a call costs, and it is read once for each 16 tokens. Its first tile is on its
way before the grid-dependency wait; it is a constant.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_rotary import norm_rotate

TOKENS = 16
TILE = 1 << 14
"""Elements of a tile of the weight."""


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
) -> None:
    layers, count, size, _, heads, dim = pages.shape
    tokens, hidden = x.shape
    _write_head[(layers * 2 * heads, triton.cdiv(tokens, TOKENS))](
        x,
        weight,
        k_norm,
        inv_freq,
        positions,
        pages,
        slot_mapping,
        tokens,
        heads,
        count * size,
        x.stride(0),
        eps,
        rope_scale,
        N=hidden,
        D=dim,
        BATCH=TOKENS,
        STEP=min(triton.next_power_of_2(hidden), TILE // dim),
        INTERLEAVED=interleaved,
        num_warps=4,
        num_stages=4 if x.element_size() == 2 else 2,
        launch_pdl=True,
    )


@triton.jit(do_not_specialize=["tokens", "heads", "slots"])
def _write_head(
    x,  # [tokens, N] act, rows x_stride apart
    weight,  # [layers * 2 * heads * D, N] act
    k_norm,  # [layers, D] act
    inv_freq,  # [D / 2] f32
    positions,  # [tokens] i64
    pages,  # [layers, slots, 2, heads, D] act
    slot_mapping,  # [tokens] i64
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
    INTERLEAVED: tl.constexpr,
):
    block = tl.program_id(0)
    layer = (block // (2 * heads)).to(tl.int64)
    part = block % (2 * heads)
    token = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    real = token < tokens
    d = tl.arange(0, D)
    k = tl.arange(0, STEP)
    cuda.gdc_launch_dependents()
    rows = weight + (block * D + d).to(tl.int64)[:, None] * N
    w = tl.load(rows + k[None, :], mask=(k < N)[None, :], other=0.0)
    norm = tl.load(k_norm + layer * D + d)
    frequency = tl.load(inv_freq + tl.arange(0, D // 2))
    cuda.gdc_wait()
    position = tl.load(positions + token, mask=real, other=0)
    slot = tl.load(slot_mapping + token, mask=real, other=0)
    inputs = x + token.to(tl.int64)[:, None] * x_stride
    tile = tl.load(inputs + k[None, :], mask=real[:, None] & (k < N)[None, :], other=0.0)
    sums = tl.dot(tile, tl.trans(w), input_precision="ieee")
    for start in range(STEP, N, STEP):
        at = start + k
        w = tl.load(rows + at[None, :], mask=(at < N)[None, :], other=0.0)
        tile = tl.load(inputs + at[None, :], mask=real[:, None] & (at < N)[None, :], other=0.0)
        sums = tl.dot(tile, tl.trans(w), sums, input_precision="ieee")
    y = sums.to(w.dtype)
    if part < heads:  # keys come first
        turned = norm_rotate(
            y, norm[None, :], frequency, position, eps, rope_scale, BATCH, D, INTERLEAVED
        )
        y = turned.to(w.dtype)
    here = pages + ((layer * slots + slot) * (2 * heads) + part)[:, None] * D + d[None, :]
    tl.store(here, y, mask=real[:, None])
