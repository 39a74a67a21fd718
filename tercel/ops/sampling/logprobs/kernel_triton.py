"""sampling/logprobs in two launches.

    1. of each part of a row: the largest logit, the sum of exp(logit - largest), how many logits
       are above the token's, and the part's likeliest tokens
    2. of each row: those sums together, in id order, and the likeliest of all parts' likeliest

Logits and ids are sorted together as one integer, of which the larger logit and then the lower id
is the larger.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_threshold import ordered
from tercel.ops.sampling.logprobs import reference

BLOCK = 2048
"""Logits per program: 80 parts of K3's vocabulary."""
MOST = 64
"""Likeliest tokens of a part that a program sorts out; the reference sorts for more."""


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if top > MOST:
        return reference.logprobs(logits, tokens, top=top)
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, BLOCK)
    integers = {"dtype": torch.int64, "device": logits.device}
    chosen, values = logits.new_empty(rows), logits.new_empty(rows, top)
    rank, ids = torch.empty(rows, **integers), torch.empty(rows, top, **integers)
    best = max(triton.next_power_of_2(top), 2) if top else 0
    sums = logits.new_empty(rows, parts, 2)
    above = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    likeliest = torch.empty(rows, parts, best, **integers)
    if rows:
        launched = {"BEST": best, "num_warps": 8, "launch_pdl": True}
        scratch = (logits, tokens, sums, above, likeliest)
        _parts[(parts, rows)](*scratch, vocabulary, BLOCK=BLOCK, **launched)
        results = (chosen, values, ids, rank)
        padded = triton.next_power_of_2(parts)
        _whole[(rows,)](*scratch, *results, vocabulary, parts, top, PARTS=padded, **launched)
    return chosen, values, ids, rank


@triton.jit
def _parts(
    logits,  # [rows, vocabulary] fp32
    tokens,  # [rows] i64
    sums,  # [rows, parts, 2] fp32: the largest, and the sum of exponentials over its
    above,  # [rows, parts] i32
    likeliest,  # [rows, parts, BEST] i64
    vocabulary,
    BEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    logits += row * vocabulary
    inside = at < vocabulary
    values = tl.load(logits + at, mask=inside, other=float("-inf"))
    bar = tl.load(logits + tl.load(tokens + row))
    most = tl.max(values, 0)
    total = tl.sum(tl.where(most > float("-inf"), tl.exp(values - most), 0.0), 0)
    there = row * tl.num_programs(0) + part
    tl.store(sums + 2 * there, most)
    tl.store(sums + 2 * there + 1, total)
    tl.store(above + there, tl.sum((values > bar).to(tl.int32), 0))
    if BEST > 0:
        key = tl.where(inside, ordered(values), -(2**31))
        best = tl.topk((key.to(tl.int64) << 32) | (0x7FFFFFFF - at), BEST)
        tl.store(likeliest + there * BEST + tl.arange(0, BEST), best)


@triton.jit(do_not_specialize=("top",))
def _whole(
    logits,  # [rows, vocabulary] fp32
    tokens,  # [rows] i64
    sums,  # [rows, parts, 2] fp32
    above,  # [rows, parts] i32
    likeliest,  # [rows, parts, BEST] i64
    chosen,  # [rows] fp32
    top_values,  # [rows, top] fp32
    top_ids,  # [rows, top] i64
    rank,  # [rows] i64
    vocabulary,
    parts,
    top,
    BEST: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    real = part < parts
    there = row * parts + part
    largest = tl.load(sums + 2 * there, mask=real, other=float("-inf"))
    totals = tl.load(sums + 2 * there + 1, mask=real, other=0.0)
    most = tl.max(largest, 0)
    log_total = tl.log(tl.sum(totals * tl.exp(largest - most), 0))
    value = tl.load(logits + row * vocabulary + tl.load(tokens + row))
    tl.store(chosen + row, value - most - log_total)
    count = tl.sum(tl.load(above + there, mask=real, other=0), 0)
    tl.store(rank + row, count.to(tl.int64) + 1)
    if BEST > 0:
        COUNT: tl.constexpr = PARTS * BEST
        every = tl.arange(0, COUNT)
        here = likeliest + row * parts * BEST + every
        held = tl.load(here, mask=every < parts * BEST, other=-(2**63))
        best = tl.topk(held, BEST)
        place = tl.arange(0, BEST)
        key = (best >> 32).to(tl.int32)
        bits = key ^ ((key >> 31) & 0x7FFFFFFF)
        value = bits.to(tl.float32, bitcast=True) - most - log_total
        tl.store(top_values + row * top + place, value, mask=place < top)
        token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        tl.store(top_ids + row * top + place, token, mask=place < top)
