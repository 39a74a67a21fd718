"""Device functions of the KDA kernels. Everything is fp32 between loads and stores."""

import triton
import triton.language as tl

from tercel.ops._lib.kernel_prefetch import prefetch

EPS = tl.constexpr(1e-6)
"""Of the normalisation of queries and keys."""


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def log_decay(f, rate, bias, bound, BOUNDED: tl.constexpr):
    """The log decay of kda_gate; `rate` is exp(A_log)."""
    a = f.to(tl.float32) + bias
    if BOUNDED:
        return bound * sigmoid(rate * a)
    # log(1 + exp(a)), to a relative precision also where exp(a) is lost beside 1.
    small = tl.exp(-tl.abs(a))
    near = 1 + small
    grown = tl.where(near == 1, small, tl.log(near) * (small / tl.where(near == 1, 1.0, near - 1)))
    return -rate * (tl.maximum(a, 0.0) + grown)


@triton.jit
def head_channels(head, H, K: tl.constexpr, V: tl.constexpr):
    """Channels of a head's query, key and value in q|k|v."""
    query = head * K + tl.arange(0, K)
    return query, H * K + query, 2 * H * K + head * V + tl.arange(0, V)


@triton.jit
def head_weights(
    conv_weight, A_log, dt_bias, head, own, channel_stride, tap_stride, W: tl.constexpr
):
    """What a head's tokens meet, `own` being its channels: the convolution's taps of query, key and
    value, and bias and rate of the decay."""
    weights = (
        taps(conv_weight, own[0], channel_stride, tap_stride, W),
        taps(conv_weight, own[1], channel_stride, tap_stride, W),
        taps(conv_weight, own[2], channel_stride, tap_stride, W),
    )
    return weights, tl.load(dt_bias + own[0]), tl.exp(tl.load(A_log + head))


@triton.jit
def head_token(rows, weights, f, b, rate, bias, bound, W: tl.constexpr, BOUNDED: tl.constexpr):
    """(q, k, v, log decay, beta) of tokens from raw rows and taps of query, key and value."""
    K: tl.constexpr = rows[0][0].shape[len(rows[0][0].shape) - 1]
    q = l2_normalize(convolve(rows[0], weights[0], W), EPS) * (K**-0.5)
    k = l2_normalize(convolve(rows[1], weights[1], W), EPS)
    v = convolve(rows[2], weights[2], W)
    g = log_decay(f, rate, bias, bound, BOUNDED)
    return q, k, v, g, sigmoid(b.to(tl.float32))


@triton.jit
def taps(weight, channel, channel_stride, tap_stride, W: tl.constexpr):
    """The convolution's W weights of `channel`, oldest first."""
    held = ()
    for tap in tl.static_range(W):
        held = held + (tl.load(weight + channel * channel_stride + tap * tap_stride),)  # noqa: RUF005
    return held


@triton.jit
def head_rows(window, qkv, own, C, W: tl.constexpr):
    """W raw rows of a head's query, key and value: those of its window and a new one."""
    return (
        _rows(window, qkv, own[0], C, W),
        _rows(window, qkv, own[1], C, W),
        _rows(window, qkv, own[2], C, W),
    )


@triton.jit
def _rows(window, qkv, channel, C, W: tl.constexpr):
    rows = ()
    for past in tl.static_range(W - 1):
        rows = rows + (tl.load(window + past * C + channel),)  # noqa: RUF005
    return rows + (tl.load(qkv + channel),)  # noqa: RUF005


@triton.jit
def convolve(rows, weights, W: tl.constexpr):
    """silu of the taps times W raw rows, rounded to the rows' dtype."""
    total = rows[0].to(tl.float32) * weights[0]
    for tap in tl.static_range(1, W):
        total += rows[tap].to(tl.float32) * weights[tap]
    return (total * sigmoid(total)).to(rows[0].dtype)


@triton.jit
def prefetch_window(window, head, H, K: tl.constexpr, V: tl.constexpr, C, ROWS: tl.constexpr):
    """Asks for a head's channels of the first ROWS rows of a window."""
    for row in tl.static_range(ROWS):
        line = window + row * C
        prefetch(line + head * K, K)
        prefetch(line + (H + head) * K, K)
        prefetch(line + 2 * H * K + head * V, V)


@triton.jit
def move_window(window, rows, own, C, W: tl.constexpr):
    """The newer W - 1 of a head's raw rows become its window."""
    for part in tl.static_range(3):
        for past in tl.static_range(W - 1):
            tl.store(window + past * C + own[part], rows[part][past + 1])


@triton.jit
def l2_normalize(x, eps):
    """Keys or queries over their length, along the last axis."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) + eps)


@triton.jit
def load_tile(state, K: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr):
    """PARTS tensors [TILE, K / PARTS] of a state [V, K]."""
    tile = ()
    for part in tl.static_range(PARTS):
        tile = tile + (tl.load(state + _offsets(part, K, TILE, PARTS)),)  # noqa: RUF005
    return tile


@triton.jit
def store_tile(state, tile, K: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr):
    for part in tl.static_range(PARTS):
        tl.store(state + _offsets(part, K, TILE, PARTS), tile[part])


@triton.jit
def _offsets(part: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr):
    key = part * (K // PARTS) + tl.arange(0, K // PARTS)
    return tl.arange(0, TILE)[:, None] * K + key[None, :]


@triton.jit
def load_keys(line, K: tl.constexpr, PARTS: tl.constexpr):
    """PARTS tensors [1, K / PARTS] of K numbers, each loaded where it is used."""
    keys = ()
    for part in tl.static_range(PARTS):
        here = line + part * (K // PARTS) + tl.arange(0, K // PARTS)
        keys = keys + (tl.load(here)[None, :],)  # noqa: RUF005
    return keys


@triton.jit
def over_keys(tile, keys, PARTS: tl.constexpr):
    """tile keys: the parts lie in one thread, so they go first."""
    total = tile[0] * keys[0]
    for part in tl.static_range(1, PARTS):
        total += tile[part] * keys[part]
    return tl.sum(total, 1)


@triton.jit
def delta_rule(tile, k, decay, v, beta, PARTS: tl.constexpr):
    """A tile after one token: S = tile * decay;  S + beta (v - S k) k^T."""
    decayed = ()
    for part in tl.static_range(PARTS):
        decayed = decayed + (tile[part] * decay[part],)  # noqa: RUF005
    error = (beta * (v - over_keys(decayed, k, PARTS)))[:, None]
    after = ()
    for part in tl.static_range(PARTS):
        after = after + (decayed[part] + error * k[part],)  # noqa: RUF005
    return after
