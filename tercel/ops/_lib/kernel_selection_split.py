"""The selection of kernel_selection.py in two launches, for few tokens.

The first scores every row of every token in a program of its own. The second mixes a token's rows
in one program, which has them on the way while the first runs: the first lets it start only after
its own wait, when what came before is in memory. So neither waits for the other's work, and nothing
but scores passes between them.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

SCORE_WARPS, MIX_WARPS = 8, 16
MOST_TOKENS = 32
LEAST_SNAPSHOTS, MOST_SNAPSHOTS = 5, 11
"""Fewer are soon scored by one program; more do not fit into its registers in the second launch."""
LEAST_WIDTH = 4096
"""Of a row that is worth a program of its own."""


def splits(row: torch.Tensor, snapshots: int) -> bool:
    """Whether two launches serve rows [T, N] better than one, by measurement on an H200
    (docs/log.md, 2026-12-01)."""
    tokens, width = row.shape
    fits = row.element_size() == 2 and snapshots <= MOST_SNAPSHOTS
    return fits and tokens <= MOST_TOKENS and width >= LEAST_WIDTH and snapshots >= LEAST_SNAPSHOTS


def split_selection(
    row: torch.Tensor,
    prefix: torch.Tensor | None,
    bank: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    epsilons: tuple[float, float],
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """As `selection`."""
    tokens, width = row.shape
    snapshots = len(bank)
    res_norm, res_proj, weight = weights
    res_eps, eps = epsilons
    normed = None if weight is None else row.new_empty(tokens, width)
    updated = row if prefix is None else row.new_empty(tokens, width)
    mixture = row.new_empty(tokens, width)
    scores = row.new_empty(tokens, snapshots + 1, dtype=torch.float32)
    sources = (row, prefix, bank)
    strides = (row.stride(0), 0 if prefix is None else prefix.stride(0), *bank.stride()[:2])
    sizes = {"N": width, "WIDTH": triton.next_power_of_2(width)}
    if tokens:
        _score[(snapshots + 1, tokens)](
            *sources, res_norm, res_proj, updated, scores, *strides, res_eps,
            **sizes, num_warps=SCORE_WARPS, launch_pdl=True,
        )  # fmt: skip
        _mix[(tokens,)](
            *sources, weight, scores, mixture, normed, *strides, eps,
            SNAPSHOTS=snapshots, **sizes, num_warps=MIX_WARPS, launch_pdl=True,
        )  # fmt: skip
    return normed, updated, mixture


@triton.jit
def _newest(x, prefix, token, n, inside, x_stride, prefix_stride):
    """The updated prefix sum."""
    now = tl.load(x + token * x_stride + n, mask=inside, other=0.0)
    if prefix is not None:
        before = tl.load(prefix + token * prefix_stride + n, mask=inside, other=0.0)
        now = (before.to(tl.float32) + now.to(tl.float32)).to(now.dtype)
    return now


@triton.jit
def _score(
    x,  # [T, N] act, rows x_stride apart
    prefix,  # [T, N] act, rows prefix_stride apart, or None
    bank,  # [snapshots, T, N] act, strided
    res_norm,  # [N] act
    res_proj,  # [N] act
    updated,  # [T, N] act; x itself where prefix is None
    scores,  # [T, snapshots + 1] fp32
    x_stride,
    prefix_stride,
    snapshot_stride,
    token_stride,
    eps,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    source = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, WIDTH)
    inside = n < N
    query = tl.load(res_norm + n, mask=inside, other=0.0).to(tl.float32)
    query *= tl.load(res_proj + n, mask=inside, other=0.0).to(tl.float32)
    cuda.gdc_wait()  # rows may be the previous kernel's
    cuda.gdc_launch_dependents()  # after the wait: _mix reads rows before its own
    if source == tl.num_programs(0) - 1:
        row = _newest(x, prefix, token, n, inside, x_stride, prefix_stride)
        if prefix is not None:
            tl.store(updated + token * N + n, row, mask=inside)
    else:
        here = bank + source.to(tl.int64) * snapshot_stride + token * token_stride
        row = tl.load(here + n, mask=inside, other=0.0)
    wide = row.to(tl.float32)
    squares, dots = tl.split(tl.sum(tl.join(wide * wide, wide * query), 0))
    score = dots * tl.rsqrt(squares / N + eps)
    tl.store(scores + token * tl.num_programs(0) + source, score)


@triton.jit
def _mix(
    x,  # [T, N] act, rows x_stride apart
    prefix,  # [T, N] act, rows prefix_stride apart, or None
    bank,  # [SNAPSHOTS, T, N] act, strided
    weight,  # [N] act, or None: no norm
    scores,  # [T, SNAPSHOTS + 1] fp32
    mixture,  # [T, N] act
    normed,  # [T, N] act, or None
    x_stride,
    prefix_stride,
    snapshot_stride,
    token_stride,
    eps,
    SNAPSHOTS: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, WIDTH)
    inside = n < N
    cuda.gdc_launch_dependents()
    if weight is not None:
        gain = tl.load(weight + n, mask=inside, other=0.0)
    rows = ()
    for source in tl.static_range(SNAPSHOTS):
        here = bank + tl.cast(source, tl.int64) * snapshot_stride + token * token_stride
        rows = rows + (tl.load(here + n, mask=inside, other=0.0),)  # noqa: RUF005
    now = _newest(x, prefix, token, n, inside, x_stride, prefix_stride)
    cuda.gdc_wait()
    scores += token * (SNAPSHOTS + 1)
    last = tl.load(scores + SNAPSHOTS)
    top = last
    held = ()
    for source in tl.static_range(SNAPSHOTS):
        held = held + (tl.load(scores + source),)  # noqa: RUF005
        top = tl.maximum(top, held[source])
    share = tl.exp(last - top)
    mixed, whole = now.to(tl.float32) * share, share
    for source in tl.static_range(SNAPSHOTS):
        share = tl.exp(held[source] - top)
        mixed += rows[source].to(tl.float32) * share
        whole += share
    mixed = (mixed / whole).to(now.dtype)
    tl.store(mixture + token * N + n, mixed, mask=inside)
    if weight is not None:
        wide = mixed.to(tl.float32)
        unit = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)).to(now.dtype)
        result = (unit.to(tl.float32) * gain.to(tl.float32)).to(now.dtype)
        tl.store(normed + token * N + n, result, mask=inside)
