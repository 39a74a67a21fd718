"""Logits without what a request's top-k, top-p and min-p drop, six launches before the others."""

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
    whole,
)


def keep_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """A copy of `logits` [R * rows, V] with -inf where a filter of the request [R] drops the id."""
    lines, vocabulary = logits.shape
    rows = lines // temperature.shape[0]

    def each(values: torch.Tensor) -> torch.Tensor:
        return values.unsqueeze(1).expand(-1, rows).flatten()

    heat = each(temperature)
    largest, _ = largest_of_parts(logits)
    least = least_kept(logits, heat, each(top_k), each(top_p), largest)
    kept, parts = torch.empty_like(logits), largest.shape[1]
    _keep[(parts, lines)](
        logits, heat, largest, least, each(min_p), kept, vocabulary, parts,
        BLOCK=BLOCK, PARTS=triton.next_power_of_2(parts), num_warps=NUM_WARPS, launch_pdl=True,
    )  # fmt: skip
    return kept


@triton.jit
def _keep(
    logits,  # [lines, vocabulary] fp32
    temperature,  # [lines] fp32
    largest,  # [lines, parts] fp32
    least,  # [lines] fp32
    min_p,  # [lines] fp32
    kept,  # [lines, vocabulary] fp32
    vocabulary,
    parts,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row * vocabulary + at
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    most, is_finite, _ = whole(largest, row, parts, PARTS)
    values = tl.load(logits + there, mask=at < vocabulary, other=float("-inf"))
    mass = mass_of(values, most, tl.load(temperature + row), least, min_p, row)
    dropped = tl.where(is_finite, mass, 1.0) == 0.0  # a row that is not finite stays so
    tl.store(kept + there, tl.where(dropped, float("-inf"), values), mask=at < vocabulary)
