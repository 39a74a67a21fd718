"""sampling/sample, in two launches for greedy rows, three for draws, seven where a row filters.

    1. of each part of a row: the largest logit, its first id, whether all are numbers
    2. of each part, in fp64: the mass exp((logit - largest) / temperature)
    3. the part in which the cumulative mass passes u of the whole, then the id inside it

Filters lie between: the smallest logit that passes top-k and top-p (kernel_threshold.py, three
launches), then the masses again, of what passes that and min-p. Parts are taken in id order and
nothing is added by atomics, so a row's token depends on that row alone.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_philox import uniform
from tercel.ops._lib.kernel_threshold import BINS, PER_UNIT, bins, thresholds

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
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if not rows:
        return tokens, finite
    parts = triton.cdiv(vocabulary, BLOCK)
    largest = logits.new_empty(rows, parts)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    launched = {"num_warps": 4, "launch_pdl": True}
    _largest[(parts, rows)](logits, largest, ids, vocabulary, BLOCK=BLOCK, **launched)
    masses = least = None
    if not greedy:
        sizes = (vocabulary, parts)
        masses = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
        counts = torch.empty(rows, parts, BINS, dtype=torch.int32, device=logits.device)
        held = {"BLOCK": BLOCK, "PARTS": triton.next_power_of_2(parts)}
        held |= {"BINS": BINS, "PER_UNIT": PER_UNIT}
        weigh = partial(_masses[(parts, rows)], logits, temperature, largest)
        weigh(None, None, masses, counts if filtered else None, *sizes, **held, **launched)
        if filtered:
            asked = (logits, temperature, top_k, top_p)
            least = thresholds(*asked, largest, masses, counts, BLOCK)
            weigh(least, min_p, masses, None, *sizes, **held, **launched)
    drawn = (logits, temperature, seeds, positions, largest, ids, masses, least)
    _token[(rows,)](
        *drawn,
        min_p,
        tokens,
        finite,
        vocabulary,
        parts,
        stream,
        BLOCK=BLOCK,
        PARTS=triton.next_power_of_2(parts),
        **launched,
    )
    return tokens, finite


@triton.jit
def _largest(
    logits,  # [rows, vocabulary] fp32
    largest,  # [rows, parts] fp32, NaN where a logit is
    ids,  # [rows, parts] i32
    vocabulary,
    BLOCK: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    values = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    broken = tl.max((values != values).to(tl.int32), 0) > 0
    most = tl.max(values, 0)
    first = tl.min(tl.where(values == most, at, vocabulary), 0)
    there = row * tl.num_programs(0) + part
    tl.store(largest + there, tl.where(broken, float("nan"), most))
    tl.store(ids + there, first)


@triton.jit
def _whole(largest, row, parts, PARTS: tl.constexpr):
    """(largest logit of the row, whether all its logits are numbers below +inf and one is not
    -inf, the parts' largest)."""
    part = tl.arange(0, PARTS)
    values = tl.load(largest + row * parts + part, mask=part < parts, other=float("-inf"))
    broken = tl.max((values != values).to(tl.int32), 0) > 0
    most = tl.max(values, 0)
    return most, (most - most == 0.0) & (broken == 0), values


@triton.jit
def _mass(logits, most, temperature, least, min_p, row):
    """fp64, relative to the largest: the sum over the vocabulary cannot overflow. Zero below the
    row's `least` logit and below min_p, if there are such."""
    heat = tl.where(temperature == 0.0, 1.0, temperature).to(tl.float64)
    mass = tl.exp((logits.to(tl.float64) - most.to(tl.float64)) / heat)
    if least is not None:
        passes = (logits >= tl.load(least + row)) & (mass >= tl.load(min_p + row).to(tl.float64))
        mass = tl.where(passes, mass, 0.0)
    return mass


@triton.jit
def _masses(
    logits,  # [rows, vocabulary] fp32
    temperature,  # [rows] fp32
    largest,  # [rows, parts] fp32
    least,  # [rows] fp32, or None: nothing is filtered
    min_p,  # [rows] fp32, or None
    masses,  # [rows, parts] fp64
    counts,  # [rows, parts, BINS] i32, or None
    vocabulary,
    parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    PER_UNIT: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    most, _, _ = _whole(largest, row, parts, PARTS)
    values = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    temperature = tl.load(temperature + row)
    mass = _mass(values, most, temperature, least, min_p, row)
    there = row * parts + part
    tl.store(masses + there, tl.sum(mass, 0))
    if counts is not None:
        heat = tl.where(temperature == 0.0, 1.0, temperature)
        held = tl.histogram(bins(values, most, heat, BINS, PER_UNIT), BINS)
        bin = tl.arange(0, BINS)
        past = tl.maximum(part * BLOCK + BLOCK - vocabulary, 0)
        tl.store(counts + there * BINS + bin, held - tl.where(bin == BINS - 1, past, 0))


@triton.jit(do_not_specialize=("stream",))
def _token(
    logits,  # [rows, vocabulary] fp32
    temperature,  # [rows] fp32
    seeds,  # [rows] i64
    positions,  # [rows] i64
    largest,  # [rows, parts] fp32
    ids,  # [rows, parts] i32
    masses,  # [rows, parts] fp64; None: all rows are greedy
    least,  # [rows] fp32, or None: nothing is filtered
    min_p,  # [rows] fp32
    tokens,  # [rows] i64
    finite,  # [rows] bool
    vocabulary,
    parts,
    stream,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    most, is_finite, values = _whole(largest, row, parts, PARTS)
    held = tl.load(ids + row * parts + part, mask=part < parts, other=0)
    token = tl.min(tl.where((values == most) & (part < parts), held, vocabulary), 0)
    if masses is not None:
        heat = tl.load(temperature + row)
        mass = tl.load(masses + row * parts + part, mask=part < parts, other=0.0)
        upto = tl.cumsum(mass, 0)
        u = uniform(tl.load(seeds + row), tl.load(positions + row), stream)
        target = u * tl.max(upto, 0)
        # Where the sums inside a part round to less than its mass, its last token is meant.
        chosen = tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), parts - 1)
        before = tl.max(tl.where(part < chosen, upto, 0.0), 0)
        at = chosen * BLOCK + tl.arange(0, BLOCK)
        inner = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
        inner = _mass(inner, most, heat, least, min_p, row)
        last = tl.max(tl.where(inner > 0.0, at, 0), 0)
        passed = before + tl.cumsum(inner, 0) > target
        drawn = tl.minimum(tl.min(tl.where(passed, at, vocabulary), 0), last)
        token = tl.where(heat == 0.0, token, drawn)
    tl.store(tokens + row, tl.where(is_finite, token, 0).to(tl.int64))
    tl.store(finite + row, is_finite)
