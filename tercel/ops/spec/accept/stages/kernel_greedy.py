"""Requests that are all greedy: one pass over their logits, and no program waits for another.

A program has a part of one row. The last of a request to get there knows all and decides.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.ops._lib.kernel_best import NEVER, id_of, score_of, word
from tercel.ops._lib.kernel_meeting import arrive, can_meet

BLOCK = 8192
"""Logits of a program."""
NUM_WARPS = 16


def accept_greedy(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    counters: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Fills `results` of op accept for requests of temperature 0."""
    requests, slots = drafts.shape
    rows, vocabulary = slots + 1, logits.shape[1]
    parts = triton.cdiv(vocabulary, BLOCK)
    words = torch.empty(requests * rows, parts, dtype=torch.int64, device=logits.device)
    meets = can_meet(counters, requests)
    for survey, decide in ((True, True),) if meets else ((True, False), (False, True)):
        grid = (parts, rows, requests) if survey else (1, 1, requests)
        _greedy[grid](
            logits,
            drafts,
            num_drafts,
            *results,
            words,
            counters,
            drafts.stride(0),
            vocabulary,
            parts,
            G=slots,
            ROWS=triton.next_power_of_2(rows),
            BLOCK=BLOCK,
            PARTS=triton.next_power_of_2(parts),
            SURVEY=survey,
            DECIDE=decide,
            num_warps=NUM_WARPS,
            launch_pdl=True,
        )


@triton.jit
def keep_matches(
    tokens,  # [requests, G + 1] i64
    accepted,  # [requests] i64
    finite,  # [requests] bool
    r,
    own,  # [ROWS] i64 what the target takes after each row
    is_finite,  # [ROWS]
    draft,  # [ROWS] i64
    drafted,  # [ROWS] whether a draft counts
    G: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The drafts that are what the target takes, as far as they are."""
    row = tl.arange(0, ROWS)
    number = tl.min(tl.where((own == draft) & is_finite & drafted, G, row), 0)
    store_result(tokens, accepted, finite, r, number, own, is_finite, draft, G, ROWS)


@triton.jit
def store_result(
    tokens, accepted, finite, r, number, own, is_finite, draft, G: tl.constexpr, ROWS: tl.constexpr
):
    """`own` [ROWS] has the token after `number` drafts at that row."""
    row = tl.arange(0, ROWS)
    token = tl.sum(tl.where((row == number) & is_finite, own, 0), 0)
    line = r * (G + 1) + row
    tl.store(tokens + line, tl.where(row < number, draft, token), mask=row <= G)
    tl.store(accepted + r, number.to(tl.int64))
    bad = (row <= number) & (is_finite == 0)
    tl.store(finite + r, tl.max(bad.to(tl.int32), 0) == 0)


@triton.jit(do_not_specialize=("draft_step",))
def _greedy(
    logits,  # [requests * (G + 1), vocabulary] f32
    drafts,  # [requests, G] i64, rows `draft_step` apart
    num_drafts,  # [requests] i64
    tokens,  # [requests, G + 1] i64
    accepted,  # [requests] i64
    finite,  # [requests] bool
    words,  # [requests * (G + 1), parts] i64
    counters,  # [requests] i32 zeros
    draft_step,
    vocabulary,
    parts,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SURVEY: tl.constexpr,
    DECIDE: tl.constexpr,
):
    r = tl.program_id(2).to(tl.int64)
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    is_last = True
    if SURVEY:
        part = tl.program_id(0)
        line = r * (G + 1) + tl.program_id(1)
        at = part * BLOCK + tl.arange(0, BLOCK)
        here = logits + line * vocabulary + at
        values = tl.load(here, mask=at < vocabulary, other=float("-inf"))
        values = tl.where(values == values, values, float("inf"))  # neither is finite
        most = tl.max(values, 0)
        first = tl.min(tl.where(values == most, at, vocabulary), 0)
        tl.store(words + line * parts + part, word(most, first))
        if DECIDE:
            is_last = arrive(counters + r) == parts * (G + 1) - 1
    if DECIDE and is_last:
        row, column = tl.arange(0, ROWS), tl.arange(0, PARTS)
        there = (row <= G)[:, None] & (column < parts)[None, :]
        found = words + (r * (G + 1) + row)[:, None] * parts + column[None, :]
        best = tl.max(tl.load(found, mask=there, other=NEVER, cache_modifier=".cg"), 1)
        slot = row < G
        draft = tl.load(drafts + r * draft_step + row, mask=slot, other=0)
        drafted = slot & (row < tl.load(num_drafts + r))
        is_finite = tl.abs(score_of(best)) < float("inf")
        keep_matches(tokens, accepted, finite, r, id_of(best), is_finite, draft, drafted, G, ROWS)
        if SURVEY:
            tl.store(counters + r, 0)
