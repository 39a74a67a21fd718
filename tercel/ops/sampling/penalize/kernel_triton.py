"""sampling/penalize in one launch for the penalties and one for the biases, which come after them
at places that have both. No two places of a list are the same, so nothing is added by atomics."""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

BLOCK = 256
"""Places per program."""


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    seen: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    bias_rows: torch.Tensor,
    bias_tokens: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    launched = {"BLOCK": BLOCK, "num_warps": 4, "launch_pdl": True}
    width = logits.shape[1]
    if len(rows):
        settings = (repetition, presence, frequency)
        _penalize[(triton.cdiv(len(rows), BLOCK),)](
            logits, rows, tokens, counts, seen, *settings, len(rows), width, **launched
        )
    if len(bias_rows):
        _add_biases[(triton.cdiv(len(bias_rows), BLOCK),)](
            logits, bias_rows, bias_tokens, bias_values, len(bias_rows), width, **launched
        )


@triton.jit(do_not_specialize=("listed",))
def _penalize(
    logits,  # [S, width] fp32
    rows,  # [listed] i64
    tokens,  # [listed] i64
    counts,  # [listed] fp32
    seen,  # [listed] fp32
    repetition,  # [S] fp32
    presence,  # [S] fp32
    frequency,  # [S] fp32
    listed,
    width,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < listed
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    row = tl.load(rows + at, mask=inside, other=0)
    here = logits + row * width + tl.load(tokens + at, mask=inside, other=0)
    value = tl.load(here, mask=inside, other=0.0)
    count = tl.load(counts + at, mask=inside, other=0.0)
    factor = tl.load(repetition + row, mask=inside, other=1.0)
    factor = tl.where(tl.load(seen + at, mask=inside, other=0.0) > 0, factor, 1.0)
    value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
    value -= tl.load(frequency + row, mask=inside, other=0.0) * count
    value -= tl.where(count > 0, tl.load(presence + row, mask=inside, other=0.0), 0.0)
    tl.store(here, value, mask=inside)


@triton.jit(do_not_specialize=("listed",))
def _add_biases(
    logits,  # [S, width] fp32
    rows,  # [listed] i64
    tokens,  # [listed] i64
    values,  # [listed] fp32
    listed,
    width,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < listed
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    row = tl.load(rows + at, mask=inside, other=0)
    here = logits + row * width + tl.load(tokens + at, mask=inside, other=0)
    value = tl.load(here, mask=inside, other=0.0) + tl.load(values + at, mask=inside, other=0.0)
    tl.store(here, value, mask=inside)
