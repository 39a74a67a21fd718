"""A chunk of KDA as far as it needs no state, for all chunks and heads at once.

Over a chunk of C tokens, with decays P from its start through a token and R from after it to its
end:

    (I + beta * tril(k k^T, -1)) T = beta          the keys' products decayed between the tokens
    w = T (k P),  u = T v,  a = tril(q k^T)

Products of a token and one up to 15 before it decay both from the middle of their block, so that
one of the two may grow; with clamped decays neither leaves the numbers of fp32. Between blocks, and
in fp32 between any two tokens, both decays are at most 1.

What is rounded, in bf16: T, k P, q P, k R, w, u and a. The factors of near products have 11 bits
(TF32), of far ones and in T as well (fp16): a row of the output may consist of one product with its
neighbour's error alone. In fp32 nothing is rounded.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

EPS = tl.constexpr(1e-6)
SPAN = tl.constexpr(16)
"""Tokens in half precision whose decays may be quotients."""
LEAST_DECAY = tl.constexpr(-10.4)
"""Per token in half precision: half of a SPAN of them is a number of fp32, and so is its inverse.
The rest is far below the rounding of the state where it is multiplied."""
LEAST_DECAY_EXACT = tl.constexpr(-40.0)
"""Per token in fp32: the rest is below the rounding of any sum that it is part of."""
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
def _inverse_lengths(here, live, D: tl.constexpr):
    """[CHUNK] what l2-normalises the rows."""
    x = _load(here, live, D).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


@triton.jit
def _load_normal(here, live, lengths, D: tl.constexpr):
    """Some channels of rows that `lengths` normalises, fp32."""
    return _load(here, live, D).to(tl.float32) * lengths[:, None]


@triton.jit
def _load_gates(here, live, HALF: tl.constexpr, D: tl.constexpr):
    """Some channels of log decays, base 2 and scaled."""
    LEAST: tl.constexpr = LEAST_DECAY if HALF.primitive_bitwidth == 16 else LEAST_DECAY_EXACT
    gates = tl.maximum(_load(here, live, D), LEAST)
    return (gates * (GATE_SCALE * LOG2_E)).to(HALF)


@triton.jit
def _log2_decay(signs, gates):
    """Base 2 logarithms of decays: the sums over the tokens that each row has a sign for."""
    return dot((signs.to(tl.float32) / GATE_SCALE).to(gates.dtype), gates)


@triton.jit
def _since_middle(i, j, BLOCK: tl.constexpr):
    """Signs of the tokens between the middle of a block and each of its tokens: those since it in
    the later half, those until it, negative, in the earlier half."""
    middle = (i // BLOCK * BLOCK + BLOCK // 2)[:, None]
    since = (j[None, :] >= middle) & (j[None, :] <= i[:, None])
    until = (j[None, :] < middle) & (j[None, :] > i[:, None])
    return since.to(tl.int32) - until.to(tl.int32)


@triton.jit
def _meet(i, j, BLOCK: tl.constexpr):
    """Marks pairs of a token in the later half of a block and one in the earlier half."""
    block = (i // BLOCK)[:, None] == (j // BLOCK)[None, :]
    return block & ((2 * i // BLOCK)[:, None] > (2 * j // BLOCK)[None, :])


@triton.jit
def _to_nearest(x):
    """fp32 rounded to the 11 bits of a TF32 product, which would cut the others off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _near_products(q, k, gates, i, j, BLOCK: tl.constexpr):
    """k k^T and q k^T [CHUNK, CHUNK] of tokens of one block, decayed from the earlier one to the
    later one: both decays are from the block's middle, so that one of them may grow."""
    log2_decay = _log2_decay(_since_middle(i, j, BLOCK), gates)
    reads = tl.exp2(log2_decay)
    keys = tl.trans(_to_nearest(k * tl.exp2(-log2_decay)))
    of_keys = tl.dot(_to_nearest(k * reads), keys, input_precision="tf32")
    of_queries = tl.dot(_to_nearest(q * reads), keys, input_precision="tf32")
    pairs = ((i // BLOCK)[:, None] == (j // BLOCK)[None, :]) & (i[:, None] > j[None, :])
    return tl.where(pairs, of_keys, 0.0), tl.where(pairs, of_queries, 0.0)


@triton.jit
def _far_products(q, k, gates, i, j, BLOCK: tl.constexpr):
    """k k^T and q k^T of a token in the later half of a block and one in the earlier half: both
    decays are from the middle to the token or from the token to the middle, so at most 1."""
    log2_decay = _log2_decay(_since_middle(i, j, BLOCK), gates)
    decay = tl.exp2(-tl.abs(log2_decay))
    keys = (k * decay).to(gates.dtype)
    meet = _meet(i, j, BLOCK)
    of_keys = tl.where(meet, dot(keys, tl.trans(keys)), 0.0)
    reads = (q * decay).to(gates.dtype)
    return of_keys, tl.where(meet, dot(reads, tl.trans(keys)), 0.0)


@triton.jit
def _products(q, k, gates, i, j, CHUNK: tl.constexpr):
    """k k^T and q k^T [CHUNK, CHUNK] below the diagonal, decayed between the tokens."""
    NEAR: tl.constexpr = SPAN if gates.dtype.primitive_bitwidth == 16 else 1
    if NEAR > 1:
        of_keys, of_queries = _near_products(q, k, gates, i, j, NEAR)
    else:
        of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
        of_queries = tl.zeros((CHUNK, CHUNK), tl.float32)
    for level in tl.static_range(1, 7):
        if (1 << level) > NEAR and (1 << level) <= CHUNK:
            more_keys, more_queries = _far_products(q, k, gates, i, j, 1 << level)
            of_keys += more_keys
            of_queries += more_queries
    return of_keys, of_queries


@triton.jit
def _invert(lower, i, j, CHUNK: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangle."""
    inverse = (i[:, None] == j[None, :]).to(lower.dtype) - tl.where(_meet(i, j, 2), lower, 0.0)
    for level in tl.static_range(2, 7):
        if (1 << level) <= CHUNK:
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
    DEPTH: tl.constexpr,
):
    ACT: tl.constexpr = qkv.dtype.element_ty
    HALF: tl.constexpr = tl.float16 if ACT.primitive_bitwidth == 16 else tl.float32
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    i = tl.arange(0, CHUNK)
    j = tl.arange(0, CHUNK)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()

    row = index_of(table + sequences + 1, chunk, sequences, SEQUENCES)
    first = tl.load(table + sequences + 1 + row)
    token = tl.load(table + row) + (chunk - first) * CHUNK + i
    live = token < tl.load(table + row + 1)
    token = token.to(tl.int64)
    q_here = qkv + token * qkv_stride + head * K
    k_here = q_here + H * K
    v_here = k_here + H * K + head * (V - K)
    g_here = g + (token * H + head) * K
    q_lengths = _inverse_lengths(q_here, live, K) * (K**-0.5)
    k_lengths = _inverse_lengths(k_here, live, K)
    beta = tl.load(b + token * b_stride + head, mask=live, other=0.0)
    beta = tl.where(live, tl.sigmoid(beta.to(tl.float32)), 0.0)

    tile = chunk.to(tl.int64) * H + head
    reads += tile * (2 * CHUNK * K)
    keys += tile * (CHUNK * K)
    own = tl.zeros((CHUNK,), tl.float32)
    of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_queries = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in tl.range(0, K, DEPTH, num_stages=1):
        q = _load_normal(q_here + start, live, q_lengths, DEPTH)
        k = _load_normal(k_here + start, live, k_lengths, DEPTH)
        gates = _load_gates(g_here + start, live, HALF, DEPTH)
        channel = start + tl.arange(0, DEPTH)
        square = i[:, None] * K + channel[None, :]
        since = tl.exp2(_log2_decay(j[None, :] <= i[:, None], gates))
        tl.store(reads + square, (k * since).to(ACT))
        tl.store(reads + CHUNK * K + square, (q * since).to(ACT))
        last = tl.broadcast_to(decay + tile * K + channel[None, :], (CHUNK, DEPTH))
        tl.store(last, since, mask=(i == CHUNK - 1)[:, None])
        until = tl.exp2(_log2_decay(j[None, :] > i[:, None], gates))
        tl.store(keys + square, (k * until).to(ACT))
        own += tl.sum(q * k, 1)
        more_keys, more_queries = _products(q, k, gates, i, j, CHUNK)
        of_keys += more_keys
        of_queries += more_queries

    of_queries += tl.where(i[:, None] == j[None, :], own[:, None], 0.0)
    pairs = i[:, None] * CHUNK + j[None, :]
    tl.store(scores + tile * (CHUNK * CHUNK) + pairs, of_queries.to(ACT))
    inverse = _invert((of_keys * beta[:, None]).to(HALF), i, j, CHUNK)
    solve = (inverse.to(tl.float32) * beta[None, :]).to(ACT)

    values += tile * (V * CHUNK)
    for start in tl.range(0, V, DEPTH, num_stages=1):
        u = dot(tl.trans(_load(v_here + start, live, DEPTH)), tl.trans(solve))
        line = (start + tl.arange(0, DEPTH))[:, None] * CHUNK
        tl.store(values + line + j[None, :], u.to(ACT))
    tl.debug_barrier()  # k P, which w replaces, comes back to other threads
    for start in tl.range(0, K, DEPTH, num_stages=1):
        square = i[:, None] * K + start + tl.arange(0, DEPTH)[None, :]
        w = dot(solve, tl.load(reads + square))
        tl.store(reads + square, (-w).to(ACT))
