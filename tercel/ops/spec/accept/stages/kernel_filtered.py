"""Logits without what a request's top-k, top-p and min-p drop: two launches before the others."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_threshold import thresholds

BLOCK = 4096
NUM_WARPS = 8


def keep_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """A copy of `logits` [R * rows, V] with -inf where a filter of the request [R] drops the id."""
    lines, vocabulary = logits.shape
    rows, asked = lines // temperature.shape[0], (temperature, top_k, top_p, min_p)
    least = thresholds(logits, *asked, counters=counters, rows_each=rows)
    kept = torch.empty_like(logits)
    _keep[(triton.cdiv(vocabulary, BLOCK), lines)](
        logits, least, kept, vocabulary, BLOCK=BLOCK, num_warps=NUM_WARPS, launch_pdl=True
    )
    return kept


@triton.jit
def _keep(
    logits,  # [lines, vocabulary] fp32
    least,  # [lines] fp32
    kept,  # [lines, vocabulary] fp32
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row * vocabulary + at
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    values = tl.load(logits + there, mask=at < vocabulary, other=float("-inf"))
    values = tl.where(values < tl.load(least + row), float("-inf"), values)  # NaN stays
    tl.store(kept + there, values, mask=at < vocabulary)
