"""sampling/sample in two launches: of a stage each, or, where a row filters, of both stages after
the filters (kernel_threshold.py).

    1. of each part of a row: the largest logit, its first id, whether all are numbers; in fp64 the
       mass exp((logit - largest) / temperature) of what passes the filters
    2. by the last program of the row to get there: the part in which the cumulative mass passes u
       of the whole, then the id inside it

Parts are taken in id order and the only atomics count programs, so a row's token depends on that
row alone. A second launch starts sooner than a last program knows that it is the last, by 0.6 us;
a small vocabulary is one part and one launch. Without counters every stage is a launch.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_meeting import arrive
from tercel.ops._lib.kernel_philox import uniform
from tercel.ops._lib.kernel_threshold import thresholds

BLOCK = 2048
"""Logits per program: 80 parts of K3's vocabulary."""


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    stream: int,
    filtered: bool,
    greedy: bool = False,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if not rows:
        return tokens, finite
    parts = triton.cdiv(vocabulary, BLOCK)
    largest = logits.new_empty(rows, parts)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    masses = least = None
    if not greedy:
        masses = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
        if filtered:
            asked = (temperature, top_k, top_p, min_p)
            least = thresholds(logits, *asked, counters=counters)
    meets = filtered and counters is not None and counters.numel() >= rows
    together = parts == 1 or meets
    for first, last in ((1, 2),) if together else ((1, 1), (2, 2)):
        _sample[(parts if first == 1 else 1, rows)](
            logits,
            temperature,
            least,
            seeds,
            positions,
            largest,
            ids,
            masses,
            counters,
            tokens,
            finite,
            vocabulary,
            parts,
            stream,
            BLOCK=BLOCK,
            PARTS=triton.next_power_of_2(parts),
            ALONE=parts == 1,
            FIRST=first,
            LAST=last,
            num_warps=4,
            launch_pdl=True,
        )
    return tokens, finite


@triton.jit
def _mass(logits, most, heat, least, row):
    """fp64, relative to `most`; zero where barred and below the row's `least` logit."""
    passes = logits > float("-inf")
    if least is not None:
        passes &= logits >= tl.load(least + row)
    scale = 1.0 / tl.where(heat == 0.0, 1.0, heat).to(tl.float64)
    return tl.where(passes, tl.exp((logits.to(tl.float64) - most.to(tl.float64)) * scale), 0.0)


@triton.jit
def _any_passes(most, heat, least, row):
    """Whether a part with this largest logit weighs anything in a draw."""
    weighs = (heat > 0.0) & (most > float("-inf"))
    if least is not None:
        weighs &= most >= tl.load(least + row)
    return weighs


@triton.jit(do_not_specialize=("stream",))
def _sample(
    logits,  # [rows, vocabulary] fp32
    temperature,  # [rows] fp32
    least,  # [rows] fp32, or None: nothing is filtered
    seeds,  # [rows] i64
    positions,  # [rows] i64
    largest,  # [rows, parts] fp32, NaN where a logit is
    ids,  # [rows, parts] i32
    masses,  # [rows, parts] fp64; None: all rows are greedy
    counters,  # [rows] i32 zeros
    tokens,  # [rows] i64
    finite,  # [rows] bool
    vocabulary,
    parts,
    stream,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ALONE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Stages FIRST .. LAST; both in one launch, or each alone."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits += row * vocabulary
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    heat = tl.load(temperature + row)
    if FIRST == 1:
        at = part * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
        broken = tl.max((values != values).to(tl.int32), 0) > 0
        most = tl.max(values, 0)
        first = tl.min(tl.where(values == most, at, vocabulary), 0)
        there = row * parts + part
        tl.store(largest + there, tl.where(broken, float("nan"), most))
        tl.store(ids + there, first)
        if masses is not None:
            mass = tl.zeros((), tl.float64)
            if _any_passes(most, heat, least, row):
                mass = tl.sum(_mass(values, most, heat, least, row), 0)
            tl.store(masses + there, mass)
    final = True
    if FIRST < LAST:
        if ALONE:
            tl.debug_barrier()
        else:
            final = arrive(counters + row) == parts - 1
    if (LAST == 2) & final:
        token, is_finite = _conclude(
            logits, heat, least, seeds, positions, largest, ids, masses, row, vocabulary, parts,
            stream, BLOCK, PARTS,
        )  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(finite + row, is_finite)
        if FIRST < LAST and not ALONE:
            tl.store(counters + row, 0)


@triton.jit
def _conclude(
    logits, heat, least, seeds, positions, largest, ids, masses, row, vocabulary, parts, stream,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """(token; whether all logits of the row are numbers below +inf and one is more than -inf)."""
    part = tl.arange(0, PARTS)
    here, there = row * parts + part, part < parts
    tops = tl.load(largest + here, mask=there, other=float("-inf"), cache_modifier=".cg")
    broken = tl.max((tops != tops).to(tl.int32), 0) > 0
    most = tl.max(tops, 0)
    is_finite = (most - most == 0.0) & (broken == 0)
    held = tl.load(ids + here, mask=there, other=0, cache_modifier=".cg")
    token = tl.min(tl.where((tops == most) & there, held, vocabulary), 0)
    if masses is not None:
        mass = tl.load(masses + here, mask=there, other=0.0, cache_modifier=".cg")
        mass *= _mass(tops, most, heat, None, row)
        upto = tl.cumsum(mass, 0)
        u = uniform(tl.load(seeds + row), tl.load(positions + row), stream)
        target = u * tl.max(upto, 0)
        # Where the sums inside a part round to less than its mass, its last token is meant.
        chosen = tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), parts - 1)
        before = tl.max(tl.where(part < chosen, upto, 0.0), 0)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        inner = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
        inner = _mass(inner, most, heat, least, row)
        last = tl.max(tl.where(inner > 0.0, at, 0), 0)
        passed = before + tl.cumsum(inner, 0) > target
        drawn = tl.minimum(tl.min(tl.where(passed, at, vocabulary), 0), last)
        token = tl.where(heat == 0.0, token, drawn)
    return tl.where(is_finite, token, 0), is_finite
