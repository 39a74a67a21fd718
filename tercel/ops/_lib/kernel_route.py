"""Routing of one token by one program, for moe/route and moe/route_quantize.

A score and its expert are sorted together, as one integer: the score's bits as an integer that
orders as floats do, NaN first, then how far the expert is from the last, so that the lower one
comes first. All are different, and the best come out of a sorting network in order.
"""

import triton
import triton.language as tl

EXPERTS_PER_WARP = 128
MAX_WARPS = 16


def form(experts: int, top_k: int) -> dict[str, int]:
    """Compile-time arguments of `route_token`, and the warps of a program that only routes."""
    padded = max(triton.next_power_of_2(experts), 32)
    warps = min(max(padded // EXPERTS_PER_WARP, 1), MAX_WARPS)
    best = triton.next_power_of_2(top_k)
    return {"PADDED": padded, "TOP_K": top_k, "BEST": best, "num_warps": warps}


@triton.jit
def route_token(
    logits,  # the token's
    biases,  # [PADDED]
    ids,
    weights,
    experts,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    BEST: tl.constexpr,
    SCALING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Writes TOP_K ids and weights; DOUBLE: the division in fp64, rounded once."""
    expert = tl.arange(0, PADDED)
    real = expert < experts
    biased = _sigmoid(tl.load(logits + expert, mask=real, other=0.0)) + biases
    bits = biased.to(tl.int32, bitcast=True)
    key = tl.where(real, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    best = tl.topk((key.to(tl.int64) << 32) | (PADDED - 1 - expert), BEST)
    chosen = PADDED - 1 - (best & 0xFFFFFFFF).to(tl.int32)
    place = tl.arange(0, BEST)
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
def load_biases(bias, experts, PADDED: tl.constexpr):
    expert = tl.arange(0, PADDED)
    return tl.load(bias + expert, mask=expert < experts, other=0.0)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))
