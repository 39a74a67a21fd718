"""A chunk of KDA as far as it needs no state, for all chunks and heads at once.

Over a chunk of C tokens, with decays P from its start through a token and R from after it to its
end:

    (I + beta * tril(k k^T, -1)) T = beta          the keys' products decayed between the tokens
    w = T (k P),  u = T v,  a = tril(q k^T)

What is rounded, in bf16: T, k P, q P, k R, w, u and a. The products inside a chunk and T are made
of fp16, which has three bits more, because a row of the output may consist of one product with its
neighbour's error alone. In fp32 nothing is rounded.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

EPS = tl.constexpr(1e-6)
LEAST_DECAY = tl.constexpr(-40.0)
"""Per token: the rest is below the rounding of any sum that it is part of."""
GATE_SCALE = tl.constexpr(1024.0)
"""fp16 keeps its digits from 6e-5 up; what marks tokens takes the factor back."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, sums=None):
    """Tensor cores in half precision, fp32 arithmetic in fp32."""
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def index_of(firsts, unit, sequences, SEQUENCES: tl.constexpr):
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
    return tl.exp2(dot(marks, gates))


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
            of_keys += tl.where(meet, dot(keys, tl.trans(keys)), 0.0)
            of_queries += tl.where(meet, dot(q * decay, tl.trans(keys)), 0.0)
    return of_keys, of_queries


@triton.jit
def _invert(lower, i, j, CHUNK: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangle."""
    inverse = (i[:, None] == j[None, :]).to(lower.dtype) - tl.where(_meet(i, j, 1), lower, 0.0)
    for level in tl.static_range(1, 6):
        if (1 << level) < CHUNK:
            corner = tl.where(_meet(i, j, 1 << level), lower, 0.0)
            corner = dot(dot(inverse, corner).to(lower.dtype), inverse)
            inverse = (inverse - corner).to(lower.dtype)
    return inverse


@triton.jit(do_not_specialize=("sequences", "b_stride", "H"))
def prepare(
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

    row = index_of(table + sequences + 1, chunk, sequences, SEQUENCES)
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

    u = dot(tl.trans(_load(here + 2 * H * K + head * (V - K), live, V)), tl.trans(solve))
    tl.store(values + tile * (V * CHUNK) + d[:, None] * CHUNK + j[None, :], u.to(ACT))
    square = i[:, None] * K + c[None, :]
    since = _decay(j[None, :] <= i[:, None], gates)
    w = dot(solve, (k.to(tl.float32) * since).to(ACT))
    reads += tile * (2 * CHUNK * K)
    tl.store(reads + square, (-w).to(ACT))
    tl.store(reads + CHUNK * K + square, (q.to(tl.float32) * since).to(ACT))
    last = tl.broadcast_to(decay + tile * K + c[None, :], (CHUNK, K))
    tl.store(last, since, mask=(i == CHUNK - 1)[:, None])
    until = _decay(j[None, :] > i[:, None], gates)
    tl.store(keys + tile * (CHUNK * K) + square, (k.to(tl.float32) * until).to(ACT))
