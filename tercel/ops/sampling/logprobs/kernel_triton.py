"""sampling/logprobs in two launches, without a sort of the vocabulary.

    1. of each part of a row: the likeliest, the sum of exp(logit - likeliest), how many logits are
       above the token's, and the likeliest of each group of neighbours
    2. of each row: those sums together, in id order. Of the parts' likeliest, the one at place
       `top` is a bound below which nothing can be among the likeliest; groups that reach it are
       read again, and their logits that do are put side by side. Of few, how many are above each
       is its place, by comparing every two; of many, each in turn is the likeliest left, for which
       only the group of the one before is read again

Logit and id are compared as one word (kernel_best), the larger logit and then the lower id first.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_best import NEVER, id_of, score_of, word
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
def _words(logits, at, inside):
    return tl.where(inside, word(tl.load(logits + at, mask=inside, other=0.0), at), NEVER)


@triton.jit
def _parts(
    logits,  # [rows, vocabulary] fp32
    tokens,  # [rows] i64
    tops,  # [rows, parts] i64: the likeliest's word
    sums,  # [rows, parts] fp32: of exponentials over the likeliest's
    above,  # [rows, parts] i32
    bests,  # [rows, parts, EACH] i64: the word of each group's likeliest
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
    # Groups outside the vocabulary count as its last id at -inf: no real word is below that.
    likeliest = tl.max(values, 1)
    first = tl.min(tl.where(values == likeliest[:, None], at, vocabulary - 1), 1)
    best = word(likeliest, first)
    top = tl.max(best, 0)
    most = score_of(top)
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
    few,  # [rows, RANKED] i64: words of what may be among the likeliest, in order of ids
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
    own = tl.load(tops + part, mask=real, other=NEVER)
    totals = tl.load(sums + row * parts + part, mask=real, other=0.0)
    count = tl.sum(tl.load(above + row * parts + part, mask=real, other=0), 0)
    value = tl.load(logits + tl.load(tokens + row))
    most = score_of(tl.max(own, 0))
    log_total = tl.log(tl.sum(tl.where(real, totals * tl.exp(score_of(own) - most), 0.0), 0))
    tl.store(chosen + row, value - most - log_total)
    tl.store(rank + row, count.to(tl.int64) + 1)
    if ANY:
        groups = parts * EACH
        group = tl.arange(0, PARTS * EACH)
        best = tl.load(bests + row * groups + group, mask=group < groups, other=NEVER)
        last = tl.max(tl.where(_above(tops, parts, own) == top - 1, own, NEVER), 0)
        last = tl.maximum(last, NEVER + 1)  # fewer parts: whatever is real
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
def _above(words, count, own):
    """How many of the words in memory are above each of `own`."""
    STEP: tl.constexpr = 32
    above = tl.zeros((own.shape[0], STEP), tl.int32)
    for start in range(0, count, STEP):
        at = start + tl.arange(0, STEP)
        other = tl.load(words + at, mask=at < count, other=NEVER)
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
            own = _words(logits, at, inside & (at < vocabulary))
            found += _put(few, found, RANKED, own, own >= last)
    return found


@triton.jit
def _give(top_values, top_ids, place, own, most, log_total, mask):
    tl.store(top_values + place, score_of(own) - most - log_total, mask=mask)
    tl.store(top_ids + place, id_of(own), mask=mask)


@triton.jit
def _ranked(few, found, top_values, top_ids, most, log_total, top):
    i = tl.arange(0, RANKED)
    own = tl.load(few + i, mask=i < found, other=NEVER)
    place = _above(few, found, own)
    _give(top_values, top_ids, place, own, most, log_total, (i < found) & (place < top))


@triton.jit
def _in_turn(
    logits, best, top_values, top_ids, most, log_total, vocabulary, top, GROUP: tl.constexpr
):
    group = tl.arange(0, best.shape[0])
    for place in range(0, top):
        own = tl.max(best, 0)
        _give(top_values, top_ids, place, own, most, log_total, True)
        which = (id_of(own) // GROUP).to(tl.int32)
        at = which * GROUP + tl.arange(0, GROUP)
        others = _words(logits, at, at < vocabulary)
        following = tl.max(tl.where(others < own, others, NEVER), 0)
        best = tl.where(group == which, following, best)
