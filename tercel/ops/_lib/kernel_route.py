"""Routing of one token by one program, for moe/route and moe/route_quantize.

A score and its expert are found together: the largest key, then the lowest expert that has it. The
key is the score's bits as an integer that orders as floats do, which one instruction of a warp
reduces; NaN comes first.
"""

import triton
import triton.language as tl


@triton.jit
def route_token(
    logits,  # the token's
    bias,
    ids,
    weights,
    experts,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    SCALING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Writes TOP_K ids and weights; DOUBLE: the division in fp64, rounded once."""
    expert = tl.arange(0, PADDED)
    real = expert < experts
    score = _sigmoid(tl.load(logits + expert, mask=real, other=0.0))
    biased = score + tl.load(bias + expert, mask=real, other=0.0)
    bits = biased.to(tl.int32, bitcast=True)
    key = tl.where(real, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    place = tl.arange(0, TOP_K_PADDED)
    chosen = tl.zeros((TOP_K_PADDED,), tl.int32)
    for index in range(TOP_K):
        best = tl.max(key, 0)
        winner = tl.min(tl.where((key == best) & real, expert, PADDED), 0)
        key = tl.where(expert == winner, -(2**31), key)
        chosen = tl.where(place == index, winner, chosen)
    inside = place < TOP_K
    share = _sigmoid(tl.load(logits + chosen, mask=inside, other=0.0))
    share = tl.where(inside, share, 0.0)
    if DOUBLE:
        share = share.to(tl.float64)
    total = tl.sum(share, 0) + 1e-20 if RENORMALIZE else 1.0
    share = share * SCALING / total
    tl.store(ids + place, chosen.to(tl.int64), mask=inside)
    tl.store(weights + place, share.to(tl.float32), mask=inside)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))
