"""attention/mla_prefill: windows of a sequence's entries, expanded and then attended to.

    _expand         k[h] = act(w_k[h] c), v[h] = act(w_v[h] c), k_rope of a window's entries
    _attend_window  softmax(scale * (q_nope . k + q_rope . k_rope)) v, causal, of a block of queries

A window is what WORKSPACE bytes hold of all heads, so a longer context takes more launches, not
more memory. Between windows a query keeps its largest score, its sum and its mixture in fp32.
Lengths are host values and arguments of the launches: nothing is copied to the device.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

WORKSPACE = 1 << 28
"""Bytes of expanded keys and values."""
ROWS = 128
"""Entries per program of `_expand`; a window is a multiple."""
LOG2_E = 1.4426950408889634
SMALLEST = tl.constexpr(-1e30)
"""Below every score, and finite: nothing seen yet."""


class Config(NamedTuple):
    """How `_attend_window` is cut into programs."""

    queries: int
    keys: int
    """Keys per step."""
    warps: int
    stages: int


def choose(dtype: torch.dtype) -> Config:
    """The configuration; fp32 products are not for tensor cores and keep their tiles small."""
    return Config(32, 32, 4, 1) if dtype == torch.float32 else Config(128, 64, 8, 3)


class _Window(NamedTuple):
    """Expanded entries; `size` of them at most."""

    keys: torch.Tensor
    """[H, size, K]"""
    ropes: torch.Tensor
    """[size, D]"""
    values: torch.Tensor
    """[H, size, V]"""

    @property
    def size(self) -> int:
        return len(self.ropes)


class _State(NamedTuple):
    """Sums of queries between windows, fp32."""

    most: torch.Tensor
    """[T, H] largest score, times log2(e)."""
    total: torch.Tensor
    """[T, H]"""
    mixed: torch.Tensor
    """[T, H, V]"""


def mla_prefill(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    cu_seqlens: tuple[int, ...],
    context_lens: tuple[int, ...],
    scale: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    config = choose(q.dtype)
    tokens, heads, _ = q.shape
    out = q.new_empty(tokens, heads * w_v.shape[1])
    counts = [stop - start for start, stop in pairwise(cu_seqlens)]
    lengths = [context + count for context, count in zip(context_lens, counts, strict=True)]
    window = _window(q, w_k, w_v, max(lengths))
    state = _state(q, w_v, carried=max(lengths) > window.size)
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        for first in range(0, lengths[row] if stop > start else 0, window.size):
            last = min(first + window.size, lengths[row])
            _launch_expand(pages, block_table[row], w_k, w_v, page_scale, window, first, last)
            span = (start, stop, context_lens[row], first, last)
            _launch_attend(q, window, state, gate, out, span, scale, config)
    return out


def _window(q: torch.Tensor, w_k: torch.Tensor, w_v: torch.Tensor, longest: int) -> _Window:
    heads, k_dim, _ = w_k.shape
    v_dim, turned = w_v.shape[1], q.shape[2] - k_dim
    entry = (heads * (k_dim + v_dim) + turned) * q.element_size()
    size = min(max(WORKSPACE // entry // ROWS, 1), triton.cdiv(longest, ROWS)) * ROWS
    return _Window(
        q.new_empty(heads, size, k_dim), q.new_empty(size, turned), q.new_empty(heads, size, v_dim)
    )


def _state(q: torch.Tensor, w_v: torch.Tensor, *, carried: bool) -> _State:
    """Empty tensors where a window holds every sequence."""
    tokens, heads = (q.shape[0], q.shape[1]) if carried else (0, 0)
    shapes = (tokens, heads), (tokens, heads), (tokens, heads, w_v.shape[1])
    return _State(*(q.new_empty(shape, dtype=torch.float32) for shape in shapes))


def _padded(size: int) -> int:
    return max(triton.next_power_of_2(size), 16)


def _launch_expand(
    pages: torch.Tensor,
    table: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    page_scale: torch.Tensor | None,
    window: _Window,
    first: int,
    last: int,
) -> None:
    heads, k_dim, rank = w_k.shape
    fp32 = window.keys.dtype == torch.float32
    rows = 32 if fp32 else ROWS
    _expand[(triton.cdiv(last - first, rows), heads, 2)](
        pages,
        table,
        w_k,
        w_v,
        page_scale,
        *window,
        first,
        last,
        window.size,
        *w_k.stride(),
        *w_v.stride(),
        PAGE=pages.shape[1],
        K=k_dim,
        V=w_v.shape[1],
        L=rank,
        D=window.ropes.shape[1],
        COLUMNS=_padded(max(k_dim, w_v.shape[1])),
        TURNED=_padded(window.ropes.shape[1]),
        ROWS=rows,
        STEP=min(_padded(rank), 64),
        num_warps=4 if fp32 else 8,
        num_stages=1 if fp32 else 4,
        launch_pdl=True,
    )


def _launch_attend(
    q: torch.Tensor,
    window: _Window,
    state: _State,
    gate: torch.Tensor | None,
    out: torch.Tensor,
    span: tuple[int, int, int, int, int],
    scale: float,
    config: Config,
) -> None:
    """`span`: the sequence's tokens from, to, the entries before them, and the window from, to."""
    heads, v_dim, k_dim = q.shape[1], window.values.shape[2], window.keys.shape[2]
    turned = window.ropes.shape[1]
    _attend_window[(triton.cdiv(span[1] - span[0], config.queries), heads)](
        q,
        *window,
        *state,
        gate,
        out,
        *span,
        window.size,
        q.stride(0),
        q.stride(1),
        0 if gate is None else gate.stride(0),
        scale * LOG2_E,
        K=k_dim,
        D=turned,
        V=v_dim,
        K_WIDTH=_padded(k_dim),
        D_WIDTH=_padded(turned),
        V_WIDTH=_padded(v_dim),
        QUERIES=config.queries,
        KEYS=config.keys,
        STAGES=config.stages,
        num_warps=config.warps,
        launch_pdl=True,
    )


@triton.jit(do_not_specialize=["first", "last", "size"])
def _expand(
    pages,  # [PAGES, PAGE, L + D] act or e4m3
    table,  # [PG] i64
    w_k,  # [H, K, L] act, strided
    w_v,  # [H, V, L] act, strided
    page_scale,  # [1] f32, or None
    keys,  # [H, size, K] act
    ropes,  # [size, D] act
    values,  # [H, size, V] act
    first,
    last,
    size,
    k_head_stride,
    k_row_stride,
    k_lane_stride,
    v_head_stride,
    v_row_stride,
    v_lane_stride,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    lane = tl.arange(0, STEP)
    if tl.program_id(2) == 0:
        rows = K
        w = w_k + head * k_head_stride + column.to(tl.int64)[None, :] * k_row_stride
        lane_stride = k_lane_stride
        target = keys + (head * size + row)[:, None] * K + column[None, :]
    else:
        rows = V
        w = w_v + head * v_head_stride + column.to(tl.int64)[None, :] * v_row_stride
        lane_stride = v_lane_stride
        target = values + (head * size + row)[:, None] * V + column[None, :]
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    position = first + row
    inside = position < last
    page = tl.load(table + position // PAGE, mask=inside, other=0)
    entry = pages + (page * PAGE + position % PAGE)[:, None] * (L + D)
    step = 1.0
    if page_scale is not None:
        step = tl.load(page_scale)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, L, STEP):
        at = start + lane
        real = at < L
        c = tl.load(entry + at[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        c = _value(c, step, keys.dtype.element_ty, page_scale is not None)
        ahead = w + at[:, None] * lane_stride
        weight = tl.load(ahead, mask=real[:, None] & (column < rows)[None, :], other=0.0)
        sums = tl.dot(c, weight, sums, input_precision="ieee")
    kept = inside[:, None] & (column < rows)[None, :]
    tl.store(target, sums.to(keys.dtype.element_ty), mask=kept)
    if (head == 0) & (tl.program_id(2) == 0):
        d = tl.arange(0, TURNED)
        mask = inside[:, None] & (d < D)[None, :]
        rope = tl.load(entry + L + d[None, :], mask=mask, other=0.0)
        rope = _value(rope, step, keys.dtype.element_ty, page_scale is not None)
        tl.store(ropes + row[:, None] * D + d[None, :], rope, mask=mask)


@triton.jit
def _value(entries, step, dtype: tl.constexpr, scaled: tl.constexpr):
    """Entries in act: as they are, or codes times the pages' scale, rounded."""
    if scaled:
        entries = (entries.to(tl.float32) * step).to(dtype)
    return entries


@triton.jit(do_not_specialize=["start", "stop", "context", "first", "last", "size"])
def _attend_window(
    q,  # [T, H, K + D] act, strided
    keys,  # [H, size, K] act
    ropes,  # [size, D] act
    values,  # [H, size, V] act
    most_of,  # [T, H] f32
    total_of,  # [T, H] f32
    mixed_of,  # [T, H, V] f32
    gate,  # [T, H * V] act, rows gate_stride apart, or None
    out,  # [T, H * V] act
    start,
    stop,
    context,
    first,
    last,
    size,
    token_stride,
    head_stride,
    gate_stride,
    scale,
    K: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    D_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The last block has most to do and goes first.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    index = block + tl.arange(0, QUERIES)
    real = start + index < stop
    token = (start + index).to(tl.int64)
    seen = context + index + 1
    sees = context + tl.minimum(block + QUERIES, stop - start)
    if sees <= first:
        return  # an earlier window held everything that these queries see
    k = tl.arange(0, K_WIDTH)
    d = tl.arange(0, D_WIDTH)
    v = tl.arange(0, V_WIDTH)
    row = q + token[:, None] * token_stride + head * head_stride
    q_nope = tl.load(row + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
    q_rope = tl.load(row + K + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    most = tl.full((QUERIES,), SMALLEST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mix = tl.zeros((QUERIES, V_WIDTH), tl.float32)
    kept = token * heads + head
    mask = real[:, None] & (v < V)[None, :]
    if first > 0:
        most = tl.load(most_of + kept, mask=real, other=0.0)
        total = tl.load(total_of + kept, mask=real, other=1.0)
        mix = tl.load(mixed_of + kept[:, None] * V + v[None, :], mask=mask, other=0.0)

    keys += head * size * K
    values += head * size * V
    end = tl.minimum(sees, last) - first
    whole = tl.minimum(tl.maximum(context + block + 1 - first, 0), end) // KEYS * KEYS
    most, total, mix = _steps(
        0, whole, end, q_nope, q_rope, keys, ropes, values, most, total, mix, seen - first, scale,
        K, D, V, K_WIDTH, D_WIDTH, V_WIDTH, KEYS, STAGES, False,
    )  # fmt: skip
    most, total, mix = _steps(
        whole, end, end, q_nope, q_rope, keys, ropes, values, most, total, mix, seen - first,
        scale, K, D, V, K_WIDTH, D_WIDTH, V_WIDTH, KEYS, STAGES, True,
    )  # fmt: skip

    if sees > last:
        tl.store(most_of + kept, most, mask=real)
        tl.store(total_of + kept, total, mask=real)
        tl.store(mixed_of + kept[:, None] * V + v[None, :], mix, mask=mask)
    else:
        o = (mix / total[:, None]).to(out.dtype.element_ty)
        column = head * V + v[None, :]
        if gate is not None:
            by = tl.load(gate + token[:, None] * gate_stride + column, mask=mask, other=0.0)
            o = (o.to(tl.float32) * by.to(tl.float32)).to(o.dtype)
        tl.store(out + token[:, None] * (heads * V) + column, o, mask=mask)


@triton.jit
def _steps(
    start,
    stop,
    end,
    q_nope,
    q_rope,
    keys,
    ropes,
    values,
    most,
    total,
    mix,
    seen,
    scale,
    K: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    K_WIDTH: tl.constexpr,
    D_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The window's keys start .. stop - 1 join the softmax; MASKED where some are not seen."""
    k = tl.arange(0, K_WIDTH)[None, :]
    d = tl.arange(0, D_WIDTH)[None, :]
    v = tl.arange(0, V_WIDTH)[None, :]
    for at in tl.range(start, stop, KEYS, num_stages=STAGES):
        j = at + tl.arange(0, KEYS)
        inside = (j < end)[:, None]
        key = tl.load(keys + j[:, None] * K + k, mask=inside & (k < K), other=0.0)
        rope = tl.load(ropes + j[:, None] * D + d, mask=inside & (d < D), other=0.0)
        value = tl.load(values + j[:, None] * V + v, mask=inside & (v < V), other=0.0)
        scores = tl.dot(q_nope, tl.trans(key), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(j[None, :] < seen[:, None], scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(most - highest)
        total = total * shrink + tl.sum(p, 1)
        mix = tl.dot(p.to(value.dtype), value, mix * shrink[:, None], input_precision="ieee")
        most = highest
    return most, total, mix
