"""The smallest logit that passes a row's top-k and top-p, without a sort of the vocabulary.

    1. of each part of a row, how many logits lie in each bin of (largest - logit) / temperature
    2. the bin below which nothing can pass: by counts for top-k, by what the rest can weigh at most
       for top-p
    3. the logits down to that bin, side by side in id order, and their masses
    4. the largest logit down to which there are k, or p of the mass: its bits from the highest
       down, two at a time, by adding up what is at least as large

Both filters keep what equals the smallest that passes. Sums are fp64, of values in id order, and
nothing is added by atomics.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

BINS = 128
PER_UNIT = 4
"""Bins per unit of (largest - logit) / temperature: masses inside one differ by a quarter or so."""
SLACK = 1.0001
"""Bins are those of fp32 quotients."""
BLOCK = 4096
"""Logits that the last step takes at a time."""
LEAST = -(2**31)


@triton.jit
def bins(logits, most, heat, BINS: tl.constexpr, PER_UNIT: tl.constexpr):
    """The larger the logit, the lower the bin; the last holds all that is far from the largest,
    barred or not a number."""
    distance = (most - logits) / heat * PER_UNIT
    return tl.where(distance < BINS - 1, distance, BINS - 1).to(tl.int32)


@triton.jit
def ordered(values):
    """fp32 as integers that order alike."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    largest: torch.Tensor,
    masses: torch.Tensor,
    counts: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """[rows] fp32, -inf where a row does not filter.

    Args:
        largest: [rows, parts] fp32, of parts of `block` logits.
        masses: [rows, parts] fp64: sums of exp((logit - the row's largest) / temperature).
        counts: [rows, parts, BINS] i32: logits per bin.
    """
    rows, vocabulary = logits.shape
    parts = largest.shape[1]
    integers = {"dtype": torch.int32, "device": logits.device}
    floors = torch.empty(rows, **integers)
    starts = torch.empty(rows, parts + 1, **integers)
    keys = torch.empty(rows, vocabulary, **integers)
    weights = torch.empty(rows, vocabulary, dtype=torch.float64, device=logits.device)
    least = logits.new_empty(rows)
    held = {"BINS": BINS, "launch_pdl": True}
    padded = triton.next_power_of_2(parts)
    _floors[(rows,)](
        counts, masses, top_k, top_p, floors, starts, vocabulary, parts,
        PARTS=padded, PER_UNIT=PER_UNIT, SLACK=SLACK, num_warps=8, **held,
    )  # fmt: skip
    _collect[(parts, rows)](
        logits, temperature, largest, floors, starts, keys, weights, vocabulary, parts,
        PARTS=padded, PER_UNIT=PER_UNIT, BLOCK=block, num_warps=4, **held,
    )  # fmt: skip
    _thresholds[(rows,)](
        keys, weights, masses, starts, top_k, top_p, least, vocabulary, parts,
        PARTS=padded, BLOCK=BLOCK, LEAST=LEAST, num_warps=16, launch_pdl=True,
    )  # fmt: skip
    return least


@triton.jit
def _floors(
    counts,  # [rows, parts, BINS] i32
    masses,  # [rows, parts] fp64
    top_k,  # [rows] i64
    top_p,  # [rows] fp32
    floors,  # [rows] i32: the last bin that may hold what passes, -1 where a row does not filter
    starts,  # [rows, parts + 1] i32: logits down to it before each part
    vocabulary,
    parts,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    SLACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part, bin = tl.arange(0, PARTS), tl.arange(0, BINS)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    here = counts + (row * parts + part[:, None]) * BINS + bin[None, :]
    held = tl.load(here, mask=(part < parts)[:, None], other=0)
    total = tl.sum(tl.load(masses + row * parts + part, mask=part < parts, other=0.0), 0)
    k, p = tl.load(top_k + row), tl.load(top_p + row).to(tl.float64)
    of_bin = tl.sum(held, 0)
    upto = tl.cumsum(of_bin, 0)
    most = of_bin * tl.exp(bin.to(tl.float64) * (-1.0 / PER_UNIT))
    after = tl.cumsum(most, 0, reverse=True) - most
    floor = -1
    if (k > 0) & (k < vocabulary):
        floor = tl.sum((upto < k).to(tl.int32), 0)
    elif p < 1.0:
        floor = tl.sum((after * SLACK > (1.0 - p) * total).to(tl.int32), 0)
    floor = tl.minimum(floor, BINS - 1)
    chosen = tl.sum(tl.where(bin[None, :] <= floor, held, 0), 1)
    tl.store(floors + row, floor)
    ends = tl.cumsum(chosen, 0)
    first = starts + row * (parts + 1)
    tl.store(first + part, ends - chosen, mask=part < parts)
    tl.store(first + parts, tl.sum(chosen, 0))


@triton.jit
def _collect(
    logits,  # [rows, vocabulary] fp32
    temperature,  # [rows] fp32
    largest,  # [rows, parts] fp32
    floors,  # [rows] i32
    starts,  # [rows, parts + 1] i32
    keys,  # [rows, vocabulary] i32: the collected, ordered as their logits are
    weights,  # [rows, vocabulary] fp64: their masses
    vocabulary,
    parts,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    first = tl.load(starts + row * (parts + 1) + part)
    if tl.load(starts + row * (parts + 1) + part + 1) > first:
        every = tl.arange(0, PARTS)
        of_parts = tl.load(largest + row * parts + every, mask=every < parts, other=float("-inf"))
        most = tl.max(of_parts, 0)
        heat = tl.load(temperature + row)
        heat = tl.where(heat == 0.0, 1.0, heat)
        inside = at < vocabulary
        values = tl.load(logits + row * vocabulary + at, mask=inside, other=float("-inf"))
        chosen = inside & (bins(values, most, heat, BINS, PER_UNIT) <= tl.load(floors + row))
        there = row * vocabulary + first + tl.cumsum(chosen.to(tl.int32), 0) - 1
        mass = tl.exp((values.to(tl.float64) - most.to(tl.float64)) / heat.to(tl.float64))
        tl.store(keys + there, ordered(values), mask=chosen)
        tl.store(weights + there, mass, mask=chosen)


@triton.jit
def _thresholds(
    keys,  # [rows, vocabulary] i32
    weights,  # [rows, vocabulary] fp64
    masses,  # [rows, parts] fp64
    starts,  # [rows, parts + 1] i32
    top_k,  # [rows] i64
    top_p,  # [rows] fp32
    least,  # [rows] fp32
    vocabulary,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    keys += row * vocabulary
    weights += row * vocabulary
    count = tl.load(starts + row * (parts + 1) + parts)
    k, p = tl.load(top_k + row), tl.load(top_p + row).to(tl.float64)
    total = tl.sum(tl.load(masses + row * parts + part, mask=part < parts, other=0.0), 0)
    floor = LEAST
    if (k > 0) & (k < vocabulary):
        floor = _reaches(keys, weights, count, k.to(tl.float64), LEAST, True, BLOCK, LEAST)
        total, _, _ = _sums(keys, weights, count, floor, floor, floor, False, BLOCK)
    if p < 1.0:
        floor = _reaches(keys, weights, count, p * total, floor, False, BLOCK, LEAST)
    bits = floor ^ ((floor >> 31) & 0x7FFFFFFF)
    value = tl.where(floor == LEAST, float("-inf"), bits.to(tl.float32, bitcast=True))
    tl.store(least + row, value)


@triton.jit
def _reaches(
    keys, weights, count, target, lowest, COUNTING: tl.constexpr, BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """The largest key down to which the masses, or with COUNTING the numbers, reach `target`;
    `lowest` where it is not reached above that."""
    found = LEAST
    for step in range(16):
        unit = 1 << (30 - 2 * step)
        first, second, third = found + unit, found + 2 * unit, found + 3 * unit
        a, b, c = _sums(keys, weights, count, first, second, third, COUNTING, BLOCK)
        digit = tl.where(a >= target, 1, 0) + tl.where(b >= target, 1, 0)
        found += (digit + tl.where(c >= target, 1, 0)) * unit
    return tl.maximum(found, lowest)


@triton.jit
def _sums(
    keys, weights, count, first, second, third, COUNTING: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What keys of at least `first`, of at least `second` and of at least `third` weigh."""
    sums = tl.zeros((2, 2), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = tl.load(keys + at, mask=at < count, other=-(2**31))
        if COUNTING:
            weight = (at < count).to(tl.float64)
        else:
            weight = tl.load(weights + at, mask=at < count, other=0.0)
        low = tl.join(tl.where(key >= first, weight, 0.0), tl.where(key >= second, weight, 0.0))
        high = tl.join(tl.where(key >= third, weight, 0.0), tl.zeros((BLOCK,), tl.float64))
        sums += tl.sum(tl.join(low, high), 0)  # all in one reduction
    # The last axis parts low from high.
    low, high = tl.split(sums)
    a, b = tl.split(low)
    c, _ = tl.split(high)
    return a, b, c
