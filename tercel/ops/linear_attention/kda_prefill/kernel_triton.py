"""linear_attention/kda_prefill in chunks: what needs no state for all chunks at once, then a pass.

Over a chunk of C tokens on a state S [V, K], with decays P from the chunk's start through a token
and R from after it to the end:

    (I + beta * tril(k k^T, -1)) T = beta          the keys' products decayed between the tokens
    w = T (k P),  u = T v,  a = tril(q k^T)        `_prepare`: any chunk, any head
    e = u - w S^T;  o = (q P) S^T + a e            `_carry`: one program carries rows of S along
    S = S * P_last + e^T (k R)

What is rounded, in bf16: T, k P, q P, k R, w, u, a, e, and S where it is multiplied; S itself stays
fp32. The products inside a chunk and T are made of fp16, which has three bits more, because a row
of o may consist of one product with its neighbour's error alone. In fp32 nothing is rounded.

Chunks are prepared to a workspace. A call is cut into slabs of tokens that bound it: 1.1 KB per
token and head in bf16.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from tercel.ops._lib.kernel_host_integers import to_device

EPS = tl.constexpr(1e-6)
LEAST_DECAY = tl.constexpr(-40.0)
"""Per token: the rest is below the rounding of any sum that it is part of."""
GATE_SCALE = tl.constexpr(1024.0)
"""fp16 keeps its digits from 6e-5 up; what marks tokens takes the factor back."""
LOG2_E = tl.constexpr(1.4426950408889634)


class Config(NamedTuple):
    """How a call is cut into programs."""

    chunk: int
    """Tokens of a chunk: 16, 32 or 64."""
    prepare_warps: int
    registers: int | None
    """Most registers of a thread of `_prepare`; None: as many as the compiler likes."""
    rows: int
    """Value channels that a program carries."""
    carry_warps: int
    stages: int
    """Chunks in flight."""
    segment_heads: int
    """Most heads with which a sequence is cut into segments."""
    segment_chunks: int
    """Fewest chunks of a sequence that is cut."""
    compose_rows: int
    """Value channels that a program composes."""
    compose_warps: int
    compose_stages: int
    slab: int
    """Tokens times heads that are prepared at a time."""


WIDE = Config(
    chunk=32,
    prepare_warps=2,
    registers=None,
    rows=64,
    carry_warps=4,
    stages=3,
    segment_heads=16,
    segment_chunks=64,
    compose_rows=32,
    compose_warps=8,
    compose_stages=3,
    slab=1 << 19,
)
EXACT = WIDE._replace(chunk=16, rows=32, stages=1, segment_heads=0)
"""In fp32 products run on CUDA cores, where small tiles lose least."""


FEW = 16
"""Calls of up to this many sequences share one build."""


class Piece(NamedTuple):
    """Tokens of one sequence."""

    row: int
    begin: int
    end: int
    fresh: bool


class Plan(NamedTuple):
    """Where the chunks and segments of a slab lie."""

    chunks: int
    segments: int
    surveyed: bool
    """Whether a sequence has more segments than one."""
    table: tuple[int, ...]
    """N + 1 bounds of the sequences in tokens, in chunks and in segments; N lengths of a segment in
    chunks; N flags of fresh sequences."""


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


def slabs(
    cu_seqlens: Sequence[int], fresh: Sequence[bool], most: int
) -> Iterator[tuple[Piece, ...]]:
    """Pieces of consecutive sequences, at most `most` tokens in all. Where a sequence is cut does
    not depend on its neighbours; a later piece goes on from what the slot then holds."""
    slab: list[Piece] = []
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        for begin in range(start, max(stop, start + 1), most):
            piece = Piece(row, begin, min(begin + most, stop), fresh[row] and begin == start)
            if slab and piece.end - slab[0].begin > most:
                yield tuple(slab)
                slab = []
            slab.append(piece)
    if slab:
        yield tuple(slab)


def plan(slab: Sequence[Piece], heads: int, config: Config) -> Plan:
    chunks = [triton.cdiv(piece.end - piece.begin, config.chunk) for piece in slab]
    lengths = [_segment_length(count, heads, config) for count in chunks]
    segments = [max(1, triton.cdiv(n, length)) for n, length in zip(chunks, lengths, strict=True)]
    begin = slab[0].begin
    bounds = (*(piece.begin - begin for piece in slab), slab[-1].end - begin)
    firsts = (0, *accumulate(chunks)), (0, *accumulate(segments))
    flags = (int(piece.fresh) for piece in slab)
    table = (*bounds, *firsts[0], *firsts[1], *lengths, *flags)
    return Plan(firsts[0][-1], firsts[1][-1], max(segments) > 1, table)


def _segment_length(chunks: int, heads: int, config: Config) -> int:
    """Few heads leave most of a GPU to further segments; to compose one takes a step as well."""
    if heads > config.segment_heads or chunks < config.segment_chunks:
        return max(chunks, 1)
    return triton.next_power_of_2(math.isqrt(chunks - 1) + 1)


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
        _prepare[(heads, where.chunks)](
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
def _dot(a, b, sums=None):
    """Tensor cores in half precision, fp32 arithmetic in fp32."""
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def _index_of(firsts, unit, sequences, SEQUENCES: tl.constexpr):
    """The sequence that a chunk or segment belongs to: the number of those that end before it."""
    n = tl.arange(0, SEQUENCES)
    ends = tl.load(firsts + 1 + n, mask=n < sequences, other=1 << 30)
    return tl.sum((ends <= unit).to(tl.int32), 0)


@triton.jit
def _load(here, live, D: tl.constexpr):
    """[CHUNK, D] rows of a head, zeros behind the end."""
    d = tl.arange(0, D)
    return tl.load(here[:, None] + d[None, :], mask=live[:, None], other=0.0)


@triton.jit
def _normalize(x):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def _decay(marks, gates):
    """The decay over the tokens that each row marks."""
    marks = tl.where(marks, 1 / GATE_SCALE, 0.0).to(gates.dtype)
    return tl.exp2(_dot(marks, gates))


@triton.jit
def _to_boundary(i, j, BLOCK: tl.constexpr):
    """Marks the tokens between each one and the boundary inside its pair of blocks: since it in
    the later block, until it in the earlier one."""
    later = (i // BLOCK)[:, None] % 2 == 1
    between = tl.where(later, j[None, :] <= i[:, None], j[None, :] > i[:, None])
    return between & ((i // BLOCK)[:, None] == (j // BLOCK)[None, :])


@triton.jit
def _meet(i, j, BLOCK: tl.constexpr):
    """Marks pairs of a token in the later block of a pair and one in the earlier block."""
    pair = (i // (2 * BLOCK))[:, None] == (j // (2 * BLOCK))[None, :]
    return pair & ((i // BLOCK)[:, None] > (j // BLOCK)[None, :])


@triton.jit
def _products(q, k, gates, i, j, CHUNK: tl.constexpr):
    """k k^T and q k^T [CHUNK, CHUNK] below the diagonal, decayed between the tokens."""
    of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_queries = tl.zeros((CHUNK, CHUNK), tl.float32)
    for level in tl.static_range(0, 6):
        if (1 << level) < CHUNK:
            decay = _decay(_to_boundary(i, j, 1 << level), gates).to(k.dtype)
            keys = k * decay
            meet = _meet(i, j, 1 << level)
            of_keys += tl.where(meet, _dot(keys, tl.trans(keys)), 0.0)
            of_queries += tl.where(meet, _dot(q * decay, tl.trans(keys)), 0.0)
    return of_keys, of_queries


@triton.jit
def _invert(lower, i, j, CHUNK: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangle."""
    inverse = (i[:, None] == j[None, :]).to(lower.dtype) - tl.where(_meet(i, j, 1), lower, 0.0)
    for level in tl.static_range(1, 6):
        if (1 << level) < CHUNK:
            corner = tl.where(_meet(i, j, 1 << level), lower, 0.0)
            corner = _dot(_dot(inverse, corner).to(lower.dtype), inverse)
            inverse = (inverse - corner).to(lower.dtype)
    return inverse


@triton.jit(do_not_specialize=("sequences", "b_stride", "H"))
def _prepare(
    qkv,  # [T, H * (2K + V)] act, rows qkv_stride apart
    g,  # [T, H, K] fp32
    b,  # [T, H] act, rows b_stride apart
    table,  # Plan
    reads,  # Workspace, fields as there
    values,
    scores,
    keys,
    decay,
    sequences,
    qkv_stride,
    b_stride,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    ACT: tl.constexpr = qkv.dtype.element_ty
    HALF: tl.constexpr = tl.float16 if ACT.primitive_bitwidth == 16 else tl.float32
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    j = tl.arange(0, CHUNK)
    c = tl.arange(0, K)
    d = tl.arange(0, V)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()

    row = _index_of(table + sequences + 1, chunk, sequences, SEQUENCES)
    first = tl.load(table + sequences + 1 + row)
    token = tl.load(table + row) + (chunk - first) * CHUNK + i
    live = token < tl.load(table + row + 1)
    token = token.to(tl.int64)
    here = qkv + token * qkv_stride + head * K
    q = _normalize(_load(here, live, K)) * (K**-0.5)
    k = _normalize(_load(here + H * K, live, K))
    own = tl.sum(q * k, 1)
    q = q.to(HALF)
    k = k.to(HALF)
    gates = tl.maximum(_load(g + (token * H + head) * K, live, K), LEAST_DECAY)
    gates = (gates * (GATE_SCALE * LOG2_E)).to(HALF)
    beta = tl.load(b + token * b_stride + head, mask=live, other=0.0)
    beta = tl.where(live, tl.sigmoid(beta.to(tl.float32)), 0.0)

    of_keys, of_queries = _products(q, k, gates, i, j, CHUNK)
    of_queries += tl.where(i[:, None] == j[None, :], own[:, None], 0.0)
    tile = chunk.to(tl.int64) * H + head
    pairs = i[:, None] * CHUNK + j[None, :]
    tl.store(scores + tile * (CHUNK * CHUNK) + pairs, of_queries.to(ACT))
    inverse = _invert((of_keys * beta[:, None]).to(HALF), i, j, CHUNK)
    solve = (inverse.to(tl.float32) * beta[None, :]).to(ACT)

    u = _dot(tl.trans(_load(here + 2 * H * K + head * (V - K), live, V)), tl.trans(solve))
    tl.store(values + tile * (V * CHUNK) + d[:, None] * CHUNK + j[None, :], u.to(ACT))
    square = i[:, None] * K + c[None, :]
    since = _decay(j[None, :] <= i[:, None], gates)
    w = _dot(solve, (k.to(tl.float32) * since).to(ACT))
    reads += tile * (2 * CHUNK * K)
    tl.store(reads + square, (-w).to(ACT))
    tl.store(reads + CHUNK * K + square, (q.to(tl.float32) * since).to(ACT))
    last = tl.broadcast_to(decay + tile * K + c[None, :], (CHUNK, K))
    tl.store(last, since, mask=(i == CHUNK - 1)[:, None])
    until = _decay(j[None, :] > i[:, None], gates)
    tl.store(keys + tile * (CHUNK * K) + square, (k.to(tl.float32) * until).to(ACT))


@triton.jit
def _segment(table, index, sequences, SEQUENCES: tl.constexpr):
    """(sequence, segment within it, its first and last chunk, whether it is the last one)."""
    N = sequences + 1
    row = _index_of(table + 2 * N, index, sequences, SEQUENCES)
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
    sums = _dot(left_low, right_high)
    sums = _dot(left_high, right_low, sums)
    return _dot(left_high, right_high, sums)


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
        errors = _dot(kept.to(ACT), tl.trans(w), u).to(ACT)
        kept = _dot(errors, k, kept * whole[None, :])
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
        errors = _dot(carried, tl.trans(w), u.to(tl.float32)).to(ACT)
        result = _dot(carried, tl.trans(q))
        result = _dot(errors, tl.trans(a), result)
        kept = _dot(errors, k, kept * whole[None, :])
        now = token + chunk * CHUNK
        there = o + (now.to(tl.int64) * H + head)[None, :] * V + d[:, None]
        tl.store(there, result.to(ACT), mask=(now < end)[None, :])
    tl.store(held, kept, mask=_everywhere(is_last, ROWS, K))
