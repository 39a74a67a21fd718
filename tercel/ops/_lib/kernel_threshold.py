"""The smallest logit that passes a row's top-k, top-p and min-p, without a sort of the vocabulary.

One launch, in which the programs of a row meet; each has a part of the vocabulary.

    1. the part's largest logit
    2. how many of its logits lie in each bin of (largest - logit) / temperature; for top-p also
       what all of them weigh, which is exp((logit - largest) / temperature)
    3. the bin below which nothing can pass: by counts for top-k, by what the rest can weigh at most
       for top-p, by its edge for min-p; the logits down to that bin, side by side in id order
    4. by the last program to get there: of few logits, how many and how much are above each, by
       comparing every two; of many, the largest logit down to which there are k, or p of the mass,
       its bits from the highest down

All filters keep what equals the smallest that passes. Masses and their sums are fp64, parts are
taken in id order, and the only atomics count programs, so a row's result repeats bit for bit and
depends on that row alone. Where programs cannot meet, a stage is a launch.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_meeting import PROGRAMS, arrive, can_meet, wait

BINS = tl.constexpr(64)
"""Four per octave of (largest - logit) / temperature, from 2 ** -4 to FAR."""
BITS, LOWEST = tl.constexpr(21), tl.constexpr((127 - 4) * 4 - 1)
"""A bin is what is left of an fp32 without its last BITS, less LOWEST."""
FAR = tl.constexpr(3072.0)
SLACK = tl.constexpr(1.0001)
"""Bins are those of fp32 quotients."""
LEAST_PART, MOST_TILE = 2048, 4096
"""Logits of a program at least, and those that it takes at a time at most."""
RANKED = tl.constexpr(256)
"""Logits of which every two are compared; more are searched."""
MEETINGS = tl.constexpr(3)
"""Counters of a row."""
LEAST = tl.constexpr(-(2**31))


@triton.jit
def ordered(values):
    """fp32 as integers that order alike."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logits(keys):
    bits = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


def thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    counters: torch.Tensor | None,
    rows_each: int = 1,
) -> torch.Tensor:
    """[rows] fp32: what a logit has to reach to pass all filters, -inf where a row does not filter
    or has temperature 0.

    Args:
        logits: [rows, vocabulary] fp32.
        temperature, top_k, top_p, min_p: [rows / rows_each], as of op sample.
        counters: [*] i32 zeros, left zero, three per row for one launch; None: four launches.
        rows_each: rows that share parameters, one after the other.
    """
    rows, vocabulary = logits.shape
    parts = max(min(PROGRAMS // rows, triton.cdiv(vocabulary, LEAST_PART)), 1)
    span = triton.cdiv(triton.cdiv(vocabulary, parts), LEAST_PART) * LEAST_PART
    parts = triton.cdiv(vocabulary, span)
    integers = {"dtype": torch.int32, "device": logits.device}
    doubles = {"dtype": torch.float64, "device": logits.device}
    tile = min(triton.next_power_of_2(span), MOST_TILE)
    largest = logits.new_empty(rows, parts)
    masses = torch.empty(rows, parts, **doubles)
    counts = torch.empty(rows, parts, BINS.value, **integers)
    keys = torch.empty(rows, vocabulary, **integers)
    weights = torch.empty(rows, vocabulary, **doubles)
    least = logits.new_empty(rows)
    together = parts == 1 or can_meet(counters, MEETINGS.value * rows)
    stages = ((1, 4),) if together else ((1, 1), (2, 2), (3, 3), (4, 4))
    for first, last in stages:
        _thresholds[(parts if first < 4 else 1, rows)](
            logits, temperature, top_k, top_p, min_p, largest, masses, counts, keys, weights, least,
            counters, vocabulary, span, parts, rows_each,
            PARTS=triton.next_power_of_2(parts), TILE=tile,
            ALONE=parts == 1, FIRST=first, LAST=last, num_warps=16, launch_pdl=True,
        )  # fmt: skip
    return least


@triton.jit
def _meet(counters, index, programs, ALONE: tl.constexpr):
    """What the others of the row stored before is there afterwards."""
    if ALONE:
        tl.debug_barrier()
    else:
        arrive(counters + index)
        wait(counters + index, programs)


@triton.jit(do_not_specialize=("rows_each",))
def _thresholds(
    logits,  # [rows, vocabulary] fp32
    temperature,  # [rows / rows_each] fp32
    top_k,  # [rows / rows_each] i64
    top_p,  # [rows / rows_each] fp32
    min_p,  # [rows / rows_each] fp32
    largest,  # [rows, parts] fp32
    masses,  # [rows, parts] fp64
    counts,  # [rows, parts, BINS] i32
    keys,  # [rows, vocabulary] i32: those collected, ordered as their logits are
    weights,  # [rows, vocabulary] fp64: what they weigh, for the last program itself
    least,  # [rows] fp32
    counters,  # [rows * MEETINGS] i32 zeros
    vocabulary,
    span,
    parts,
    rows_each,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    ALONE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Stages FIRST .. LAST; all of them in one launch, or each alone."""
    TOGETHER: tl.constexpr = FIRST < LAST
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    asked = row // rows_each
    heat = tl.load(temperature + asked)
    k, p = tl.load(top_k + asked), tl.load(top_p + asked).to(tl.float64)
    m = tl.load(min_p + asked)
    counting = (k > 0) & (k < vocabulary)
    sharing = p < 1.0
    if (heat > 0.0) & (counting | sharing | (m > 0.0)):
        logits += row * vocabulary
        first = part * span
        last = tl.minimum(first + span, vocabulary)
        every = tl.arange(0, PARTS)
        here = row * parts + every
        meeting = row * MEETINGS
        keys += row * vocabulary
        weights += row * vocabulary
        if FIRST == 1:
            tl.store(largest + row * parts + part, _largest(logits, first, last, TILE))
            if TOGETHER:
                _meet(counters, meeting, parts, ALONE)
        if LAST > 1:
            tops = tl.load(
                largest + here, mask=every < parts, other=float("-inf"), cache_modifier=".cg"
            )
            most = tl.max(tops, 0)
        if (FIRST <= 2) & (LAST >= 2):
            weighing = sharing & (counting == 0)
            held, mass = _spread(logits, first, last, most, heat, weighing, TILE)
            tl.store(counts + (row * parts + part) * BINS + tl.arange(0, BINS), held)
            tl.store(masses + row * parts + part, mass)
            if TOGETHER:
                _meet(counters, meeting + 1, parts, ALONE)
        if LAST > 2:
            parted = tl.load(masses + here, mask=every < parts, other=0.0, cache_modifier=".cg")
            total = tl.sum(parted, 0)
            bin = tl.arange(0, BINS)
            held = tl.load(
                counts + here[:, None] * BINS + bin[None, :],
                mask=(every < parts)[:, None],
                other=0,
                cache_modifier=".cg",
            )
            of_bin = tl.sum(held, 0)
            floor = _floor(of_bin, total, k, p, m, counting)
            chosen = tl.sum(tl.where(bin[None, :] <= floor, held, 0), 1)
            count = tl.sum(chosen, 0)
        if (FIRST <= 3) & (LAST >= 3):
            start = tl.sum(tl.where(every < part, chosen, 0), 0)
            own = tl.sum(tl.where(every == part, chosen, 0), 0)
            if own > 0:
                _collect(logits, first, last, most, heat, floor, keys, start, TILE)
        if LAST == 4:
            final = True
            if TOGETHER:
                if ALONE:
                    tl.debug_barrier()
                else:
                    final = arrive(counters + meeting + 2) == parts - 1
            if final:
                if count <= RANKED:
                    _weigh(keys, weights, count, most, heat, RANKED)
                    key = _ranked(keys, weights, count, total, k, p, m, counting)
                else:
                    _weigh(keys, weights, count, most, heat, TILE)
                    key = _searched(keys, weights, count, total, k, p, m, counting, TILE)
                tl.store(least + row, _logits(key))
                if TOGETHER and not ALONE:
                    for index in tl.static_range(MEETINGS):
                        tl.store(counters + meeting + index, 0)
    elif (LAST == 4) & (part == 0):
        tl.store(least + row, float("-inf"))


@triton.jit
def _tile(logits, start, last, TILE: tl.constexpr):
    at = start + tl.arange(0, TILE)
    return tl.load(logits + at, mask=at < last, other=float("-inf"))


@triton.jit
def _largest(logits, first, last, TILE: tl.constexpr):
    most = tl.full((TILE,), float("-inf"), tl.float32)
    values = _tile(logits, first, last, TILE)
    for start in range(first, last, TILE):
        coming = _tile(logits, start + TILE, last, TILE)
        most = tl.maximum(most, values)
        values = coming
    return tl.max(most, 0)


@triton.jit
def _bins(logits, most, heat):
    """The larger the logit, the lower the bin; the last holds all that is far from the largest,
    barred or not a number."""
    distance = (most - logits) / heat
    bin = (distance.to(tl.int32, bitcast=True) >> BITS) - LOWEST
    return tl.where(distance < FAR, tl.maximum(bin, 0), BINS - 1)


@triton.jit
def _mass(logits, most, heat):
    return tl.exp((logits.to(tl.float64) - most.to(tl.float64)) * (1.0 / heat.to(tl.float64)))


@triton.jit
def _spread(logits, first, last, most, heat, weighing, TILE: tl.constexpr):
    """([BINS] logits per bin, what all of them weigh; 0 unless `weighing`)."""
    held = tl.zeros((BINS,), tl.int32)
    mass = tl.zeros((TILE,), tl.float64)
    values = _tile(logits, first, last, TILE)
    for start in range(first, last, TILE):
        coming = _tile(logits, start + TILE, last, TILE)
        held += tl.histogram(_bins(values, most, heat), BINS)
        if weighing:
            mass += _mass(values, most, heat)
        values = coming
    past = tl.cdiv(last - first, TILE) * TILE - (last - first)
    return held - tl.where(tl.arange(0, BINS) == BINS - 1, past, 0), tl.sum(mass, 0)


@triton.jit
def _floor(of_bin, total, k, p, m, counting):
    """The last bin that may hold what passes, and for top-k all that its masses are shares of."""
    bin = tl.arange(0, BINS)
    if counting:
        floor = tl.sum((tl.cumsum(of_bin, 0) < k).to(tl.int32), 0)
    else:
        floor = BINS - 1
        if p < 1.0:
            edge = ((bin + LOWEST) << BITS).to(tl.float32, bitcast=True)
            edge = tl.where(bin > 0, edge, 0.0).to(tl.float64)
            most = of_bin * tl.exp(-edge)
            after = tl.cumsum(most, 0, reverse=True) - most
            floor = tl.sum((after * SLACK > (1.0 - p) * total).to(tl.int32), 0)
        if m > 0.0:
            passing = _bins(tl.log(m) * SLACK, m * 0.0, 1.0)
            floor = tl.minimum(floor, passing)
    return tl.minimum(floor, BINS - 1)


@triton.jit
def _collect(logits, first, last, most, heat, floor, keys, there, TILE: tl.constexpr):
    """Puts what lies down to bin `floor` side by side, from place `there` on."""
    values = _tile(logits, first, last, TILE)
    for start in range(first, last, TILE):
        coming = _tile(logits, start + TILE, last, TILE)
        chosen = _bins(values, most, heat) <= floor
        chosen &= start + tl.arange(0, TILE) < last
        found = tl.sum(chosen.to(tl.int32), 0)
        if found > 0:
            place = there + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(keys + place, ordered(values), mask=chosen)
        there += found
        values = coming


@triton.jit
def _weigh(keys, weights, count, most, heat, TILE: tl.constexpr):
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        key = tl.load(keys + at, mask=at < count, other=LEAST, cache_modifier=".cg")
        tl.store(weights + at, _mass(_logits(key), most, heat), mask=at < count)
    tl.debug_barrier()


@triton.jit
def _ranked(keys, weights, count, total, k, p, m, counting):
    """The smallest key that passes, by what is above each of them."""
    STEP: tl.constexpr = 32
    i = tl.arange(0, RANKED)
    key = tl.load(keys + i, mask=i < count, other=LEAST, cache_modifier=".cg")
    weight = tl.load(weights + i, mask=i < count, other=0.0, cache_modifier=".cg")
    number = tl.zeros((RANKED, STEP), tl.int32)
    above = tl.zeros((RANKED, STEP), tl.float64)
    for start in range(0, count, STEP):
        j = start + tl.arange(0, STEP)
        other = tl.load(keys + j, mask=j < count, other=LEAST, cache_modifier=".cg")
        mass = tl.load(weights + j, mask=j < count, other=0.0, cache_modifier=".cg")
        larger = other[None, :] > key[:, None]
        number += larger.to(tl.int32)
        above += tl.where(larger, mass[None, :], 0.0)
    passes = (i < count) & (weight >= m.to(tl.float64))
    if counting:
        among = (i < count) & (tl.sum(number, 1) < k)
        total = tl.sum(tl.where(among, weight, 0.0), 0)
        passes &= among
    if p < 1.0:
        passes &= tl.sum(above, 1) < p * total
    return tl.min(tl.where(passes, key, 0x7FFFFFFF), 0)


@triton.jit
def _searched(keys, weights, count, total, k, p, m, counting, TILE: tl.constexpr):
    """As _ranked, of any number."""
    floor = LEAST
    if counting:
        floor = _reaches(keys, weights, count, k.to(tl.float64), True, TILE)
        total, _, _ = _sums(keys, weights, count, floor, floor, floor, False, TILE)
    if p < 1.0:
        share = _reaches(keys, weights, count, p * total, False, TILE)
        floor = tl.maximum(floor, share)
    if m > 0.0:
        smallest = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            key = tl.load(keys + at, mask=at < count, other=LEAST, cache_modifier=".cg")
            mass = tl.load(weights + at, mask=at < count, other=0.0, cache_modifier=".cg")
            smallest = tl.minimum(smallest, tl.where(mass >= m.to(tl.float64), key, 0x7FFFFFFF))
        floor = tl.maximum(floor, tl.min(smallest, 0))
    return floor


@triton.jit
def _reaches(keys, weights, count, target, COUNTING: tl.constexpr, TILE: tl.constexpr):
    """The largest key down to which the masses, or with COUNTING the numbers, reach `target`."""
    found = LEAST
    for step in range(16):
        unit = 1 << (30 - 2 * step)
        first, second, third = found + unit, found + 2 * unit, found + 3 * unit
        a, b, c = _sums(keys, weights, count, first, second, third, COUNTING, TILE)
        digit = tl.where(a >= target, 1, 0) + tl.where(b >= target, 1, 0)
        found += (digit + tl.where(c >= target, 1, 0)) * unit
    return found


@triton.jit
def _sums(
    keys, weights, count, first, second, third, COUNTING: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """What keys of at least `first`, of at least `second` and of at least `third` weigh."""
    a = tl.zeros((TILE,), tl.float64)
    b, c = a, a
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        key = tl.load(keys + at, mask=at < count, other=LEAST, cache_modifier=".cg")
        if COUNTING:
            weight = (at < count).to(tl.float64)
        else:
            weight = tl.load(weights + at, mask=at < count, other=0.0, cache_modifier=".cg")
        a += tl.where(key >= first, weight, 0.0)
        b += tl.where(key >= second, weight, 0.0)
        c += tl.where(key >= third, weight, 0.0)
    # All in one reduction. The last axis parts low from high.
    low, high = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, c)), 0))
    first_sum, second_sum = tl.split(low)
    third_sum, _ = tl.split(high)
    return first_sum, second_sum, third_sum
