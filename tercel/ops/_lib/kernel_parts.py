"""Rows of logits in parts: a part's largest logit, its mass, and the row's least that a filter keeps.

Parts are taken in id order and nothing is added by atomics, so what is known of a row depends on
that row alone.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_threshold import BINS, PER_UNIT, bins, thresholds

BLOCK = 2048
"""Logits of a part: 80 parts of K3's vocabulary."""
NUM_WARPS = 4


def largest_of_parts(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [rows, vocabulary] fp32: (largest [rows, parts] fp32, NaN where a logit is; the first id
    of it [rows, parts] i32)."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, BLOCK)
    largest = logits.new_empty(rows, parts)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _largest[(parts, rows)](
        logits, largest, ids, vocabulary, BLOCK=BLOCK, num_warps=NUM_WARPS, launch_pdl=True
    )
    return largest, ids


def masses_of_parts(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    largest: torch.Tensor,
    least: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, parts] fp64 masses relative to the row's largest, of logits of at least `least` whose
    mass is at least `min_p`; fills `counts` [rows, parts, BINS] i32."""
    rows, parts = largest.shape
    masses = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    _masses[(parts, rows)](
        logits, temperature, largest, least, min_p, masses, counts, logits.shape[1], parts,
        BLOCK=BLOCK, PARTS=triton.next_power_of_2(parts), BINS=BINS, PER_UNIT=PER_UNIT,
        num_warps=NUM_WARPS, launch_pdl=True,
    )  # fmt: skip
    return masses


def least_kept(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    largest: torch.Tensor,
) -> torch.Tensor:
    """[rows] fp32: the smallest logit that passes a row's top-k and top-p; four launches."""
    counts = torch.empty(*largest.shape, BINS, dtype=torch.int32, device=logits.device)
    masses = masses_of_parts(logits, temperature, largest, counts=counts)
    return thresholds(logits, temperature, top_k, top_p, largest, masses, counts, BLOCK)


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
def whole(largest, row, parts, PARTS: tl.constexpr):
    """(largest logit of the row, whether all its logits are numbers below +inf and one is not
    -inf, the parts' largest)."""
    part = tl.arange(0, PARTS)
    values = tl.load(largest + row * parts + part, mask=part < parts, other=float("-inf"))
    broken = tl.max((values != values).to(tl.int32), 0) > 0
    most = tl.max(values, 0)
    return most, (most - most == 0.0) & (broken == 0), values


@triton.jit
def mass_of(logits, most, temperature, least, min_p, row):
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
    most, _, _ = whole(largest, row, parts, PARTS)
    values = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    temperature = tl.load(temperature + row)
    mass = mass_of(values, most, temperature, least, min_p, row)
    there = row * parts + part
    tl.store(masses + there, tl.sum(mass, 0))
    if counts is not None:
        heat = tl.where(temperature == 0.0, 1.0, temperature)
        held = tl.histogram(bins(values, most, heat, BINS, PER_UNIT), BINS)
        bin = tl.arange(0, BINS)
        past = tl.maximum(part * BLOCK + BLOCK - vocabulary, 0)
        tl.store(counts + there * BINS + bin, held - tl.where(bin == BINS - 1, past, 0))
