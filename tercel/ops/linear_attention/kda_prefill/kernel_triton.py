"""linear_attention/kda_prefill in chunks: what needs no state for all chunks at once, then a pass.

    w, u, a, q P, k R                      `prepare`, kernel_kda_chunk.py: any chunk, any head
    e = u - w S^T;  o = (q P) S^T + a e    `_carry`: one program carries rows of S along
    S = S * P_last + e^T (k R)

In bf16, e and S are rounded where they are multiplied; S itself stays fp32. Long sequences of few
heads are cut into segments: `_survey` finds what each does to any state, `_compose` goes through
them one after the other.

Chunks are prepared to a workspace. A call is cut into slabs of tokens that bound it: 1.1 KB per
token and head in bf16.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from tercel.ops._lib.kernel_host_integers import to_device
from tercel.ops._lib.kernel_kda_chunk import dot, index_of, prepare
from tercel.ops.linear_attention.kda_prefill.plan import EXACT, WIDE, Config, Plan, plan, slabs

FEW = 16
"""Calls of up to this many sequences share one build."""


class Workspace(NamedTuple):
    """What a chunk is prepared to, [chunks, H, *]."""

    reads: torch.Tensor
    """[2, C, K]: minus w, then q P."""
    values: torch.Tensor
    """[V, C]: u, transposed."""
    scores: torch.Tensor
    """[C, C]: a."""
    keys: torch.Tensor
    """[C, K]: k R."""
    decay: torch.Tensor
    """[K] fp32: P of the last token."""

    @classmethod
    def like(cls, qkv: torch.Tensor, state: torch.Tensor, chunks: int, size: int) -> "Workspace":
        _, heads, v_dim, k_dim = state.shape
        return cls(
            qkv.new_empty(chunks, heads, 2, size, k_dim),
            qkv.new_empty(chunks, heads, v_dim, size),
            qkv.new_empty(chunks, heads, size, size),
            qkv.new_empty(chunks, heads, size, k_dim),
            state.new_empty(chunks, heads, k_dim),
        )

    def tiles(self, rows: int) -> dict[str, TensorDescriptor]:
        """The matrices, for copies of whole tiles; `rows` of values at a time."""
        size = self.scores.shape[-1]
        heights = {"reads": size, "values": rows, "scores": size, "keys": size}
        return {name: _tile(getattr(self, name), height) for name, height in heights.items()}


def _tile(x: torch.Tensor, height: int) -> TensorDescriptor:
    flat = x.view(-1, x.shape[-1])
    return TensorDescriptor.from_tensor(flat, [height, x.shape[-1]])


def kda_prefill(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    cu_seqlens: tuple[int, ...],
    fresh: tuple[bool, ...],
) -> torch.Tensor:
    config = EXACT if qkv.dtype == torch.float32 else WIDE
    return launch(qkv, g, b, state, slots, cu_seqlens, fresh, config)


def launch(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: Sequence[int],
    fresh: Sequence[bool],
    config: Config,
) -> torch.Tensor:
    """One call with `config`, whichever it is."""
    o = qkv.new_empty(len(qkv), *state.shape[1:3])
    most = max(1024, config.slab // state.shape[1] // 1024 * 1024)
    for slab in slabs(cu_seqlens, fresh, most):
        tokens = slice(slab[0].begin, slab[-1].end)
        rows = slots[slab[0].row : slab[-1].row + 1]
        where = plan(slab, state.shape[1], config)
        _run(qkv[tokens], g[tokens], b[tokens], state, rows, o[tokens], where, config)
    return o


def _run(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    o: torch.Tensor,
    where: Plan,
    config: Config,
) -> None:
    """One slab, into `o`."""
    _, heads, v_dim, k_dim = state.shape
    sequences, rows = len(slots), min(config.rows, v_dim, k_dim)
    table = to_device(where.table, qkv.device)
    work = Workspace.like(qkv, state, max(1, where.chunks), config.chunk)
    head = {"K": k_dim, "V": v_dim}
    sizes = {
        **head,
        "CHUNK": config.chunk,
        "SEQUENCES": max(FEW, triton.next_power_of_2(sequences)),
    }
    if where.chunks:
        prepare[(heads, where.chunks)](
            qkv,
            g,
            b,
            table,
            *work,
            sequences,
            qkv.stride(0),
            b.stride(0),
            heads,
            **sizes,
            DEPTH=min(config.depth, k_dim, v_dim),
            num_warps=config.prepare_warps,
            maxnreg=config.registers,
            launch_pdl=True,
        )
    ends = state.new_empty(where.segments if where.surveyed else 1, heads, v_dim + k_dim, k_dim)
    common = (state, slots, table, *work.tiles(rows).values(), work.decay, ends)
    options = {"ROWS": rows, "STAGES": config.stages, "num_warps": config.carry_warps}
    if where.surveyed:
        grid = ((v_dim + k_dim) // rows, heads, where.segments)
        _survey[grid](*common, sequences, heads, **sizes, **options, launch_pdl=True)
        few = min(config.compose_rows, v_dim)
        tuning = {"ROWS": few, "STAGES": config.compose_stages, "num_warps": config.compose_warps}
        grid = (v_dim // few, heads, sequences)
        _compose[grid](table, ends, sequences, heads, **head, **tuning, launch_pdl=True)
    grid = (v_dim // rows, heads, where.segments)
    _carry[grid](*common, o, sequences, heads, **sizes, **options, launch_pdl=True)


@triton.jit
def _segment(table, index, sequences, SEQUENCES: tl.constexpr):
    """(sequence, segment within it, its first and last chunk, whether it is the last one)."""
    N = sequences + 1
    row = index_of(table + 2 * N, index, sequences, SEQUENCES)
    number = index - tl.load(table + 2 * N + row)
    length = tl.load(table + 3 * N + row)
    first = tl.load(table + N + row)
    end = tl.load(table + N + row + 1)
    begin = first + number * length
    last = tl.minimum(begin + length, end)
    return row, number, begin, last, index + 1 == tl.load(table + 2 * N + row + 1)


@triton.jit
def _split_dot(left, right):
    """The product of fp32 factors, of which 16 bits count."""
    left_high = left.to(tl.bfloat16)
    left_low = (left - left_high.to(tl.float32)).to(tl.bfloat16)
    right_high = right.to(tl.bfloat16)
    right_low = (right - right_high.to(tl.float32)).to(tl.bfloat16)
    sums = dot(left_low, right_high)
    sums = dot(left_high, right_low, sums)
    return dot(left_high, right_high, sums)


@triton.jit
def _is_fresh(table, row, sequences):
    return tl.load(table + 3 * (sequences + 1) + sequences + row) != 0


@triton.jit
def _everywhere(condition, ROWS: tl.constexpr, K: tl.constexpr):
    """A scalar condition as a mask."""
    return (condition.to(tl.int32) + tl.zeros((ROWS, K), tl.int32)) != 0


@triton.jit(do_not_specialize=("sequences", "H"))
def _survey(
    state,  # [SLOTS, H, V, K] fp32
    slots,  # [N] i64
    table,  # Plan
    reads,  # Workspace, as tiles
    values,
    scores,
    keys,
    decay,
    ends,  # [segments, H, V + K, K] fp32: F, then M
    sequences,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    ACT: tl.constexpr = reads.dtype
    head = tl.program_id(1)
    segment = tl.program_id(2)
    c = tl.arange(0, K)
    begin_row = tl.program_id(0) * ROWS
    d = begin_row + tl.arange(0, ROWS)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()

    row, number, first, last, is_last = _segment(table, segment, sequences, SEQUENCES)
    of_values = begin_row < V
    if is_last | ((number == 0) & (begin_row >= V)):
        return
    slot = tl.load(slots + row)
    held = state + (slot * H + head) * (V * K) + d[:, None] * K + c[None, :]
    from_pool = of_values & (number == 0) & ~_is_fresh(table, row, sequences)
    kept = tl.load(held, mask=_everywhere(from_pool, ROWS, K), other=0.0)
    kept += (d[:, None] - V == c[None, :]).to(tl.float32)
    start = first * H + head
    value_row = tl.minimum(begin_row, V - ROWS)
    for chunk in tl.range(0, last - first, num_stages=STAGES):
        tile = start + chunk * H
        w = reads.load([2 * CHUNK * tile, 0])
        k = keys.load([CHUNK * tile, 0])
        u = values.load([V * tile + value_row, 0]).to(tl.float32)
        whole = tl.load(decay + tile.to(tl.int64) * K + c)
        u = tl.where(of_values, u, 0.0)
        errors = dot(kept.to(ACT), tl.trans(w), u).to(ACT)
        kept = dot(errors, k, kept * whole[None, :])
    there = ends + (segment * H + head).to(tl.int64) * ((V + K) * K)
    tl.store(there + d[:, None] * K + c[None, :], kept)


@triton.jit(do_not_specialize=("sequences", "H"))
def _compose(
    table,  # Plan
    ends,  # as survey leaves them; F becomes the state at the end of the segment
    sequences,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(2)
    c = tl.arange(0, K)
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()

    first = tl.load(table + 2 * (sequences + 1) + row)
    last = tl.load(table + 2 * (sequences + 1) + row + 1) - 1
    rows = ends + (first * H + head).to(tl.int64) * ((V + K) * K) + d[:, None] * K + c[None, :]
    maps = ends + (first * H + head).to(tl.int64) * ((V + K) * K) + V * K
    maps += c[:, None] * K + c[None, :]
    kept = tl.load(rows, mask=_everywhere(last > first, ROWS, K), other=0.0)
    step = H * ((V + K) * K)
    for segment in tl.range(1, last - first, num_stages=STAGES):
        kept = tl.load(rows + segment * step) + _split_dot(kept, tl.load(maps + segment * step))
        tl.store(rows + segment * step, kept)


@triton.jit(do_not_specialize=("sequences", "H"))
def _carry(
    state,  # [SLOTS, H, V, K] fp32
    slots,  # [N] i64
    table,  # Plan
    reads,  # Workspace, as tiles
    values,
    scores,
    keys,
    decay,
    ends,  # [segments, H, V + K, K] fp32: the state at the end of a segment, then other data
    o,  # [T, H, V] act
    sequences,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    ACT: tl.constexpr = reads.dtype
    head = tl.program_id(1)
    segment = tl.program_id(2)
    j = tl.arange(0, CHUNK)
    c = tl.arange(0, K)
    begin_row = tl.program_id(0) * ROWS
    d = begin_row + tl.arange(0, ROWS)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()

    row, number, first, last, is_last = _segment(table, segment, sequences, SEQUENCES)
    slot = tl.load(slots + row)
    held = state + (slot * H + head) * (V * K) + d[:, None] * K + c[None, :]
    from_pool = (number == 0) & ~_is_fresh(table, row, sequences)
    kept = tl.load(held, mask=_everywhere(from_pool, ROWS, K), other=0.0)
    before = ends + ((segment - 1) * H + head).to(tl.int64) * ((V + K) * K)
    before += d[:, None] * K + c[None, :]
    kept += tl.load(before, mask=_everywhere(number > 0, ROWS, K), other=0.0)
    end = tl.load(table + row + 1)
    token = tl.load(table + row) + (first - tl.load(table + sequences + 1 + row)) * CHUNK + j
    start = first * H + head
    for chunk in tl.range(0, last - first, num_stages=STAGES):
        tile = start + chunk * H
        w = reads.load([2 * CHUNK * tile, 0])
        q = reads.load([2 * CHUNK * tile + CHUNK, 0])
        k = keys.load([CHUNK * tile, 0])
        a = scores.load([CHUNK * tile, 0])
        u = values.load([V * tile + begin_row, 0])
        whole = tl.load(decay + tile.to(tl.int64) * K + c)
        carried = kept.to(ACT)
        errors = dot(carried, tl.trans(w), u.to(tl.float32)).to(ACT)
        result = dot(carried, tl.trans(q))
        result = dot(errors, tl.trans(a), result)
        kept = dot(errors, k, kept * whole[None, :])
        now = token + chunk * CHUNK
        there = o + (now.to(tl.int64) * H + head)[None, :] * V + d[:, None]
        tl.store(there, result.to(ACT), mask=(now < end)[None, :])
    tl.store(held, kept, mask=_everywhere(is_last, ROWS, K))
