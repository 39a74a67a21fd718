"""The slots of a token whose expert is on this rank, as the bits of one integer in a kernel."""

import triton
import triton.language as tl


@triton.jit
def local_slots(ids, first_expert, experts, CHOSEN: tl.constexpr):
    """The token's slots whose expert is here, one bit each."""
    slot = tl.arange(0, 32)  # a whole warp sums integers in one instruction
    local = tl.load(ids + slot, mask=slot < CHOSEN, other=-1) - first_expert
    inside = (slot < CHOSEN) & (local >= 0) & (local < experts)
    return tl.sum(tl.where(inside, 1 << slot, 0), 0)


@triton.jit
def without_first(slots, count, MOST: tl.constexpr):
    """`slots` without the `count` lowest, at most MOST."""
    for index in tl.static_range(MOST):
        slots = tl.where(index < count, slots & (slots - 1), slots)
    return slots


@triton.jit
def first(slots):
    """The number of the lowest bit, from the exponent of its value; 0 where there is none."""
    bit = (slots & -slots).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum((bit >> 23) - 127, 0)
