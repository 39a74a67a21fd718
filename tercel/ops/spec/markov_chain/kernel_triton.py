"""spec/markov_chain: one launch whose programs, each with a part of the vocabulary, meet per draft.

A program adds its part of w2 @ w1[previous] to the logits of a slot, for 16 requests at a time, and
stores the largest score and its id; when all have, each reads the best of all. What does not depend
on the previous draft, noise included, is on its way before. Scores are those of the portable form:
logits are fp32, scores of drawn requests fp64, so the best does not depend on who asks. Without
counters a slot is a launch. Ranks exchange between slots: the portable form serves groups of them.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.core.group import Group
from tercel.core.sampling import Stream
from tercel.ops._lib.kernel_meeting import PROGRAMS, arrive, can_meet, wait
from tercel.ops._lib.kernel_philox import gumbel
from tercel.ops.spec.markov_chain import portable

REQUESTS = 16
BLOCK = 128
"""Ids per tile at most; 80 programs hold one each of a sixteenth of Kimi K3's vocabulary."""
LEAST = 64
CHUNK = 64
"""Of the rank, per product."""
FIRST_STREAM = tl.constexpr(int(Stream.DRAFT))


def markov_chain(
    base: torch.Tensor,
    anchors: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    group: Group,
    num_drafts: int,
    greedy: bool = False,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    requests, vocabulary = anchors.shape[0], base.shape[1]
    if group.world_size > 1:
        given = (base, anchors, w1, w2, temperature, seeds, positions)
        return portable.markov_chain(*given, group=group, num_drafts=num_drafts, greedy=greedy)
    tokens = torch.empty(requests, num_drafts, dtype=torch.int64, device=base.device)
    logits = torch.empty_like(base)
    if not requests:
        return tokens, logits
    block = LEAST
    while block < BLOCK and triton.cdiv(vocabulary, block) > PROGRAMS:
        block *= 2
    tiles = triton.cdiv(triton.cdiv(vocabulary, block), PROGRAMS)
    programs = triton.cdiv(vocabulary, tiles * block)
    scores = torch.float32 if greedy else torch.float64
    best = torch.empty(num_drafts, requests, programs, dtype=scores, device=base.device)
    ids = torch.empty(num_drafts, requests, programs, dtype=torch.int32, device=base.device)
    rank = 0 if w1 is None else w1.shape[1]
    meets = can_meet(counters, num_drafts)
    stages = ((0, num_drafts),) if meets else ((i, i + 1) for i in range(num_drafts + 1))
    for first, last in stages:
        _chain[(programs,)](
            base,
            anchors,
            w1,
            w2,
            temperature,
            seeds,
            positions,
            tokens,
            logits,
            best,
            ids,
            counters,
            requests,
            vocabulary,
            first,
            last,
            SLOTS=num_drafts,
            D=rank,
            CHUNK=min(triton.next_power_of_2(max(rank, 16)), CHUNK),
            TILES=tiles,
            BLOCK=block,
            BATCH=REQUESTS,
            PARTS=triton.next_power_of_2(programs),
            GREEDY=greedy,
            MEETS=meets,
            num_warps=8,
            num_stages=1,
            launch_pdl=True,
        )
    return tokens, logits


@triton.jit
def _weights(w2, at, chunk: tl.constexpr, vocabulary, D: tl.constexpr, CHUNK: tl.constexpr):
    """[ids at, a chunk of the rank], zeros outside."""
    k = chunk * CHUNK + tl.arange(0, CHUNK)
    here = w2 + at.to(tl.int64)[:, None] * D + k[None, :]
    return tl.load(here, mask=(at < vocabulary)[:, None] & (k < D)[None, :], other=0.0)


@triton.jit
def _best(best, ids, request, real, programs, vocabulary, PARTS: tl.constexpr):
    """[BATCH] the id of the largest score, the lowest of several."""
    part = tl.arange(0, PARTS)
    at = request.to(tl.int64)[:, None] * programs + part[None, :]
    there = real[:, None] & (part < programs)[None, :]
    value = tl.load(best + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    index = tl.load(ids + at, mask=there, other=vocabulary, cache_modifier=".cg")
    most = tl.max(value, 1)
    found = tl.min(tl.where(value == most[:, None], index, vocabulary), 1)
    return tl.minimum(found, vocabulary - 1).to(tl.int64)


@triton.jit(do_not_specialize=("requests", "first", "last"))
def _chain(
    base,  # [requests * SLOTS, vocabulary] f32
    anchors,  # [requests] i64
    w1,  # [vocabulary, D] act, or None: no bias
    w2,  # [vocabulary, D] act
    temperature,  # [requests] f32
    seeds,  # [requests] i64
    positions,  # [requests] i64
    tokens,  # [requests, SLOTS] i64
    logits,  # [requests * SLOTS, vocabulary] f32
    best,  # [SLOTS, requests, programs] f32 or f64
    ids,  # [SLOTS, requests, programs] i32
    counters,  # [SLOTS] i32 zeros
    requests,
    vocabulary,
    first,
    last,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    BATCH: tl.constexpr,
    PARTS: tl.constexpr,
    GREEDY: tl.constexpr,
    MEETS: tl.constexpr,
):
    """Slots first .. last - 1; the last draft is chosen where slot SLOTS would begin."""
    part, programs = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, BLOCK)
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    groups = tl.cdiv(requests, BATCH)
    start = part * TILES * BLOCK
    cuda.gdc_launch_dependents()
    held = ()
    if w2 is not None and TILES == 1:  # read once, and before the wait: it is a constant
        for chunk in tl.static_range(CHUNKS):
            held = held + (_weights(w2, start + n, chunk, vocabulary, D, CHUNK),)  # noqa: RUF005
    cuda.gdc_wait()
    for slot in range(first, tl.minimum(last, SLOTS)):
        for g in range(groups):
            request = g * BATCH + tl.arange(0, BATCH)
            real = request < requests
            line = request.to(tl.int64) * SLOTS + slot
            heat = tl.load(temperature + request, mask=real, other=0.0)
            if not GREEDY:
                seed = tl.load(seeds + request, mask=real, other=0)
                position = tl.load(positions + request, mask=real, other=0)
                stream = (seed * 0 + FIRST_STREAM + slot)[:, None]
            top = tl.full((BATCH,), float("-inf"), best.dtype.element_ty)
            index = tl.full((BATCH,), 0, tl.int32) + vocabulary
            for tile in tl.static_range(TILES):
                at = start + tile * BLOCK + n
                inside = real[:, None] & (at < vocabulary)[None, :]
                there = line[:, None] * vocabulary + at[None, :]
                row = tl.load(base + there, mask=inside, other=float("-inf"))
                if not GREEDY:
                    noise = gumbel(seed, position, stream, start + tile * BLOCK, BATCH, BLOCK)
                if tile == 0:
                    if slot == 0:
                        previous = tl.load(anchors + request, mask=real, other=0)
                    else:
                        if MEETS and g == 0:
                            wait(counters + slot - 1, programs)
                        before = (slot - 1) * requests * programs
                        previous = _best(
                            best + before, ids + before, request, real, programs, vocabulary, PARTS
                        )
                        if part == 0:
                            tl.store(tokens + line - 1, previous, mask=real)
                if w2 is not None:  # chunks meet in fp32: a tensor core's own sums are cut off
                    for chunk in tl.static_range(CHUNKS):
                        k = chunk * CHUNK + tl.arange(0, CHUNK)
                        here = w1 + previous[:, None] * D + k[None, :]
                        up = tl.load(here, mask=real[:, None] & (k < D)[None, :], other=0.0)
                        if TILES == 1:
                            down = held[chunk]
                        else:
                            down = _weights(w2, at, chunk, vocabulary, D, CHUNK)
                        row += tl.dot(up, tl.trans(down), input_precision="ieee")
                tl.store(logits + there, row, mask=inside)
                row = tl.where(row == row, row, float("-inf"))
                if GREEDY:
                    score = row
                else:
                    still = heat == 0.0
                    hot = tl.where(still, 1.0, heat).to(tl.float64)
                    wide = row.to(tl.float64)
                    drawn = wide / hot[:, None] + noise
                    score = tl.where(still[:, None], wide, drawn)
                most = tl.max(score, 1)
                found = tl.where(score == most[:, None], at[None, :], vocabulary)
                found = tl.min(found, 1)
                index = tl.where((most > top) | (index == vocabulary), found, index)
                top = tl.maximum(top, most)
            own = (slot * requests + request) * programs + part
            tl.store(best + own, top, mask=real)
            tl.store(ids + own, index, mask=real)
        if MEETS:
            earlier = arrive(counters + slot)
            if (slot == SLOTS - 1) & (earlier == programs - 1):
                for g in range(groups):
                    request = g * BATCH + tl.arange(0, BATCH)
                    real = request < requests
                    there = slot * requests * programs
                    final = _best(
                        best + there, ids + there, request, real, programs, vocabulary, PARTS
                    )
                    tl.store(tokens + request.to(tl.int64) * SLOTS + slot, final, mask=real)
                for done in range(SLOTS):
                    tl.store(counters + done, 0)
    if (last > SLOTS) & (part == 0):
        for g in range(groups):
            request = g * BATCH + tl.arange(0, BATCH)
            real = request < requests
            there = (SLOTS - 1) * requests * programs
            final = _best(best + there, ids + there, request, real, programs, vocabulary, PARTS)
            tl.store(tokens + request.to(tl.int64) * SLOTS + SLOTS - 1, final, mask=real)
