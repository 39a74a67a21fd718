"""sampling/logprobs in two launches, without a sort of the vocabulary.

    1. of each part of a row: the likeliest, the sum of exp(logit - likeliest), how many logits are
       above the token's, and the likeliest of each group of neighbours
    2. of each row: those sums together, in id order. Nothing below the last of the `top` parts with
       the likeliest of their own is among the likeliest of all; groups that have something else are
       read again, and what it is is put side by side. Of few such, how many are above each is its
       place, by comparing every two; of many, each in turn is the likeliest left, for which only
       the group of the one before is read again

Logit and id are compared as one integer, of which the larger logit and then the lower id is the
larger.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_threshold import ordered
from tercel.ops.sampling.logprobs import reference

MOST = 64
"""Likeliest tokens that the kernel finds; the reference sorts for more."""
PARTS, LEAST_PART = 128, 64
"""Parts of a row at most, of which every two are compared; logits of a part at least."""
EACH = 32
"""Groups of a part."""
WARPS, ROW_WARPS = 2, 8
"""Of programs of the first launch and of the second."""
TILE = 2048
"""Logits that a program of the second launch takes at a time."""
RANKED = tl.constexpr(256)
"""Logits of which every two are compared."""
LEAST = tl.constexpr(-(2**63))
"""Below what any logit and id are."""


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if top > MOST:
        return reference.logprobs(logits, tokens, top=top)
    rows, vocabulary = logits.shape
    part = max(triton.next_power_of_2(triton.cdiv(vocabulary, PARTS)), LEAST_PART)
    parts = triton.cdiv(vocabulary, part)
    groups = parts * EACH if top else 0
    long = {"dtype": torch.int64, "device": logits.device}
    short = {"dtype": torch.int32, "device": logits.device}
    chosen, values = logits.new_empty(rows), logits.new_empty(rows, top)
    rank, ids = torch.empty(rows, **long), torch.empty(rows, top, **long)
    tops, sums = torch.empty(rows, parts, **long), logits.new_empty(rows, parts)
    above, bests = torch.empty(rows, parts, **short), torch.empty(rows, groups, **long)
    which, few = torch.empty(rows, groups, **short), torch.empty(rows, RANKED.value, **long)
    if rows:
        scratch = (tops, sums, above, bests)
        sizes = {"ANY": top > 0, "EACH": EACH, "GROUP": part // EACH}
        _parts[(parts, rows)](
            logits, tokens, *scratch, vocabulary, **sizes, num_warps=WARPS, launch_pdl=True
        )
        _whole[(rows,)](
            logits, tokens, *scratch, which, few, chosen, values, ids, rank, vocabulary, parts, top,
            PARTS=triton.next_power_of_2(parts), TILE=TILE,
            **sizes, num_warps=ROW_WARPS, launch_pdl=True,
        )  # fmt: skip
    return chosen, values, ids, rank


@triton.jit
def _key(value, at):
    """Logit and id as one integer; zeros of both signs are equal."""
    return (ordered(value + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - at)


@triton.jit
def _keys(logits, at, inside):
    return tl.where(inside, _key(tl.load(logits + at, mask=inside, other=0.0), at), LEAST)


@triton.jit
def _logit(key):
    high = (key >> 32).to(tl.int32)
    bits = high ^ ((high >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _token(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _parts(
    logits,  # [rows, vocabulary] fp32
    tokens,  # [rows] i64
    tops,  # [rows, parts] i64: the likeliest's key
    sums,  # [rows, parts] fp32: of exponentials over the likeliest's
    above,  # [rows, parts] i32
    bests,  # [rows, parts, EACH] i64: the key of each group's likeliest
    vocabulary,
    ANY: tl.constexpr,
    EACH: tl.constexpr,
    GROUP: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = tl.arange(0, EACH)
    at = part * EACH * GROUP + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    logits += row * vocabulary
    values = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
    bar = tl.load(logits + tl.load(tokens + row))
    # A group outside the vocabulary has the last id at -inf, which nothing there is is below.
    likeliest = tl.max(values, 1)
    first = tl.min(tl.where(values == likeliest[:, None], at, vocabulary - 1), 1)
    best = _key(likeliest, first)
    top = tl.max(best, 0)
    most = _logit(top)
    here = row * tl.num_programs(0) + part
    tl.store(tops + here, top)
    barred = most == float("-inf")
    tl.store(sums + here, tl.sum(tl.where(barred, 0.0, tl.exp(values - most))))
    tl.store(above + here, tl.sum((values > bar).to(tl.int32)))
    if ANY:
        tl.store(bests + here * EACH + group, best)


@triton.jit(do_not_specialize=("top",))
def _whole(
    logits,  # [rows, vocabulary] fp32
    tokens,  # [rows] i64
    tops,  # [rows, parts] i64
    sums,  # [rows, parts] fp32
    above,  # [rows, parts] i32
    bests,  # [rows, parts, EACH] i64
    which,  # [rows, parts * EACH] i32: groups that may have one of the likeliest, in order
    few,  # [rows, RANKED] i64: keys of what may be among the likeliest, in order of ids
    chosen,  # [rows] fp32
    top_values,  # [rows, top] fp32
    top_ids,  # [rows, top] i64
    rank,  # [rows] i64
    vocabulary,
    parts,
    top,
    ANY: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    real = part < parts
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    logits += row * vocabulary
    tops += row * parts
    key = tl.load(tops + part, mask=real, other=LEAST)
    totals = tl.load(sums + row * parts + part, mask=real, other=0.0)
    count = tl.sum(tl.load(above + row * parts + part, mask=real, other=0), 0)
    value = tl.load(logits + tl.load(tokens + row))
    most = _logit(tl.max(key, 0))
    log_total = tl.log(tl.sum(tl.where(real, totals * tl.exp(_logit(key) - most), 0.0), 0))
    tl.store(chosen + row, value - most - log_total)
    tl.store(rank + row, count.to(tl.int64) + 1)
    if ANY:
        groups = parts * EACH
        group = tl.arange(0, PARTS * EACH)
        best = tl.load(bests + row * groups + group, mask=group < groups, other=LEAST)
        last = tl.max(tl.where(_above(tops, parts, key) == top - 1, key, LEAST), 0)
        last = tl.maximum(last, LEAST + 1)
        top_values += row * top
        top_ids += row * top
        which += row * groups
        few += row * RANKED
        wanted = _put(which, 0, groups, group, best >= last)
        tl.debug_barrier()
        found = _gather(logits, which, wanted, last, few, vocabulary, GROUP, TILE)
        if found <= RANKED:
            tl.debug_barrier()
            _ranked(few, found, top_values, top_ids, most, log_total, top)
        else:
            _in_turn(logits, best, top_values, top_ids, most, log_total, vocabulary, top, GROUP)


@triton.jit
def _above(keys, count, own):
    """How many of the keys in memory are above each of `own`."""
    STEP: tl.constexpr = 32
    above = tl.zeros((own.shape[0], STEP), tl.int32)
    for start in range(0, count, STEP):
        at = start + tl.arange(0, STEP)
        other = tl.load(keys + at, mask=at < count, other=LEAST)
        above += (other[None, :] > own[:, None]).to(tl.int32)
    return tl.sum(above, 1)


@triton.jit
def _put(there, start, size, values, chosen):
    """Puts the chosen side by side from place `start` on, as far as `size` goes; how many."""
    place = start + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(there + place, values, mask=chosen & (place < size))
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _gather(logits, which, wanted, last, few, vocabulary, GROUP: tl.constexpr, TILE: tl.constexpr):
    """How many of the wanted groups' logits are not below `last`; more than RANKED are not all
    counted."""
    found = 0
    for start in range(0, wanted * GROUP, TILE):
        if found <= RANKED:
            at = start + tl.arange(0, TILE)
            inside = at < wanted * GROUP
            group = tl.load(which + at // GROUP, mask=inside, other=0)
            at = group * GROUP + at % GROUP
            key = _keys(logits, at, inside & (at < vocabulary))
            found += _put(few, found, RANKED, key, key >= last)
    return found


@triton.jit
def _give(top_values, top_ids, place, key, most, log_total, mask):
    tl.store(top_values + place, _logit(key) - most - log_total, mask=mask)
    tl.store(top_ids + place, _token(key), mask=mask)


@triton.jit
def _ranked(few, found, top_values, top_ids, most, log_total, top):
    i = tl.arange(0, RANKED)
    key = tl.load(few + i, mask=i < found, other=LEAST)
    place = _above(few, found, key)
    _give(top_values, top_ids, place, key, most, log_total, (i < found) & (place < top))


@triton.jit
def _in_turn(
    logits, best, top_values, top_ids, most, log_total, vocabulary, top, GROUP: tl.constexpr
):
    group = tl.arange(0, best.shape[0])
    for place in range(0, top):
        key = tl.max(best, 0)
        _give(top_values, top_ids, place, key, most, log_total, True)
        which = (_token(key) // GROUP).to(tl.int32)
        at = which * GROUP + tl.arange(0, GROUP)
        others = _keys(logits, at, at < vocabulary)
        following = tl.max(tl.where(others < key, others, LEAST), 0)
        best = tl.where(group == which, following, best)
