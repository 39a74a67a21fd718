"""sampling/logprobs in two launches, without a sort of the vocabulary.

    1. of each group of neighbouring logits: the likeliest, the sum of exp(logit - likeliest), and
       how many logits are above the token's
    2. of each row: those sums together, in id order; then of the `top` groups with the likeliest
       of their own, what is no less likely than the last of these: nothing else can be among the
       likeliest. Of few such, how many are above each is its place, by comparing every two; of
       many, each in turn is the likeliest left, for which only the group of the last is read again

Logit and id are compared as one integer, of which the larger logit and then the lower id is the
larger. Places of the few in memory differ between runs, results do not.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_threshold import ordered
from tercel.ops.sampling.logprobs import reference

MOST = 64
"""Likeliest tokens that the kernel finds; the reference sorts for more."""
GROUPS, LEAST_GROUP = 256, 64
"""Groups of a row at most, of which every two are compared; logits of a group at least."""
BLOCK, WARPS = 2048, 4
"""Logits and warps of a program of the first launch."""
GATHERED, ROW_WARPS = 16384, 16
"""Logits that a program of the second launch takes at a time, and its warps."""
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
    group = max(triton.next_power_of_2(triton.cdiv(vocabulary, GROUPS)), LEAST_GROUP)
    groups = triton.cdiv(vocabulary, group)
    each = max(BLOCK // group, 1)
    long = {"dtype": torch.int64, "device": logits.device}
    short = {"dtype": torch.int32, "device": logits.device}
    chosen, values = logits.new_empty(rows), logits.new_empty(rows, top)
    rank, ids = torch.empty(rows, **long), torch.empty(rows, top, **long)
    bests, sums = torch.empty(rows, groups, **long), logits.new_empty(rows, groups)
    above, counters = torch.empty(rows, groups, **short), torch.empty(rows, **short)
    few = torch.empty(rows, RANKED.value if top else 0, **long)
    if rows:
        scratch = (bests, sums, above, counters)
        _groups[(triton.cdiv(groups, each), rows)](
            logits, tokens, *scratch, vocabulary, groups,
            EACH=each, GROUP=group, num_warps=WARPS, launch_pdl=True,
        )  # fmt: skip
        _whole[(rows,)](
            logits, tokens, *scratch, few, chosen, values, ids, rank, vocabulary, groups, top,
            ANY=top > 0, GROUPS=triton.next_power_of_2(groups), GROUP=group,
            STEP=max(GATHERED // group, 1), num_warps=ROW_WARPS, launch_pdl=True,
        )  # fmt: skip
    return chosen, values, ids, rank


@triton.jit
def _keys(values, at, vocabulary):
    """Logits and ids as one integer; zeros of both signs are equal."""
    key = (ordered(values + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - at)
    return tl.where(at < vocabulary, key, LEAST)


@triton.jit
def _logit(key):
    high = (key >> 32).to(tl.int32)
    bits = high ^ ((high >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _token(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def _groups(
    logits,  # [rows, vocabulary] fp32
    tokens,  # [rows] i64
    bests,  # [rows, groups] i64: the likeliest's key
    sums,  # [rows, groups] fp32: of exponentials over the likeliest's
    above,  # [rows, groups] i32
    counters,  # [rows] i32: zero afterwards
    vocabulary,
    groups,
    EACH: tl.constexpr,
    GROUP: tl.constexpr,
):
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = program * EACH + tl.arange(0, EACH)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    logits += row * vocabulary
    values = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
    bar = tl.load(logits + tl.load(tokens + row))
    best = tl.max(_keys(values, at, vocabulary), 1)
    most = _logit(best)[:, None]
    total = tl.sum(tl.where(most == float("-inf"), 0.0, tl.exp(values - most)), 1)
    here, real = row * groups + group, group < groups
    tl.store(bests + here, best, mask=real)
    tl.store(sums + here, total, mask=real)
    tl.store(above + here, tl.sum((values > bar).to(tl.int32), 1), mask=real)
    if program == 0:
        tl.store(counters + row, 0)


@triton.jit(do_not_specialize=("top",))
def _whole(
    logits,  # [rows, vocabulary] fp32
    tokens,  # [rows] i64
    bests,  # [rows, groups] i64
    sums,  # [rows, groups] fp32
    above,  # [rows, groups] i32
    counters,  # [rows] i32 zeros
    few,  # [rows, RANKED] i64: keys of what may be among the likeliest
    chosen,  # [rows] fp32
    top_values,  # [rows, top] fp32
    top_ids,  # [rows, top] i64
    rank,  # [rows] i64
    vocabulary,
    groups,
    top,
    ANY: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    real = group < groups
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    logits += row * vocabulary
    here = row * groups + group
    best = tl.load(bests + here, mask=real, other=LEAST)
    totals = tl.load(sums + here, mask=real, other=0.0)
    count = tl.sum(tl.load(above + here, mask=real, other=0), 0)
    most = _logit(tl.max(best, 0))
    log_total = tl.log(tl.sum(tl.where(real, totals * tl.exp(_logit(best) - most), 0.0), 0))
    value = tl.load(logits + tl.load(tokens + row))
    tl.store(chosen + row, value - most - log_total)
    tl.store(rank + row, count.to(tl.int64) + 1)
    if ANY:
        top_values += row * top
        top_ids += row * top
        few += row * RANKED
        place = _above(bests + row * groups, groups, best)
        found = _gather(
            logits, best, place, counters + row, few, vocabulary, groups, top, STEP, GROUP
        )
        if found <= RANKED:
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
        other = tl.load(keys + at, mask=at < count, other=LEAST, cache_modifier=".cg")
        above += (other[None, :] > own[:, None]).to(tl.int32)
    return tl.sum(above, 1)


@triton.jit
def _gather(
    logits,
    best,
    place,
    counter,
    few,
    vocabulary,
    groups,
    top,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """How many may be among the likeliest; up to RANKED are put side by side, in no order."""
    group = tl.arange(0, best.shape[0])
    last = tl.max(tl.where(place == top - 1, best, LEAST), 0)
    last = tl.maximum(last, LEAST + 1)
    wanted = tl.minimum(top, groups)
    found = 0
    for start in range(0, wanted, STEP):
        index = start + tl.arange(0, STEP)
        which = tl.sum(tl.where(place[None, :] == index[:, None], group[None, :], 0), 1)
        at = which[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (index < wanted)[:, None] & (at < vocabulary)
        key = _keys(tl.load(logits + at, mask=inside, other=0.0), at, vocabulary)
        among = inside & (key >= last)
        found += tl.sum(among.to(tl.int32))
        if found <= RANKED:
            slot = tl.atomic_add(counter + at * 0, 1, mask=among, sem="relaxed")
            tl.store(few + slot, key, mask=among)
    tl.debug_barrier()
    return found


@triton.jit
def _give(top_values, top_ids, place, key, most, log_total, mask):
    tl.store(top_values + place, _logit(key) - most - log_total, mask=mask)
    tl.store(top_ids + place, _token(key), mask=mask)


@triton.jit
def _ranked(few, found, top_values, top_ids, most, log_total, top):
    i = tl.arange(0, RANKED)
    key = tl.load(few + i, mask=i < found, other=LEAST, cache_modifier=".cg")
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
        values = tl.load(logits + at, mask=at < vocabulary, other=0.0)
        others = _keys(values, at, vocabulary)
        following = tl.max(tl.where(others < key, others, LEAST), 0)
        best = tl.where(group == which, following, best)
