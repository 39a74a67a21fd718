"""sampling/sample, in two launches for greedy rows, three for draws, seven where a row filters.

    1. of each part of a row: the largest logit, its first id, whether all are numbers
    2. of each part, in fp64: the mass exp((logit - largest) / temperature)
    3. the part in which the cumulative mass passes u of the whole, then the id inside it

Filters lie between: the smallest logit that passes top-k and top-p (kernel_threshold.py, three
launches), then the masses again, of what passes that and min-p. Parts are taken in id order and
nothing is added by atomics, so a row's token depends on that row alone.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_parts import (
    BLOCK,
    NUM_WARPS,
    largest_of_parts,
    least_kept,
    mass_of,
    masses_of_parts,
    whole,
)
from tercel.ops._lib.kernel_philox import uniform


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
    largest, ids = largest_of_parts(logits)
    masses = least = None
    if not greedy:
        if filtered:
            least = least_kept(logits, temperature, top_k, top_p, largest)
        masses = masses_of_parts(logits, temperature, largest, least, min_p if filtered else None)
    parts = largest.shape[1]
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
        num_warps=NUM_WARPS,
        launch_pdl=True,
    )
    return tokens, finite


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
    most, is_finite, values = whole(largest, row, parts, PARTS)
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
        inner = mass_of(inner, most, heat, least, min_p, row)
        last = tl.max(tl.where(inner > 0.0, at, 0), 0)
        passed = before + tl.cumsum(inner, 0) > target
        drawn = tl.minimum(tl.min(tl.where(passed, at, vocabulary), 0), last)
        token = tl.where(heat == 0.0, token, drawn)
    tl.store(tokens + row, tl.where(is_finite, token, 0).to(tl.int64))
    tl.store(finite + row, is_finite)
