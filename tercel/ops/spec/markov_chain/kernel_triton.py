"""spec/markov_chain: one launch whose programs, each with a part of the vocabulary, meet per draft.

A program adds its part of w2 @ w1[previous] to the logits of a slot, for up to 64 requests at a
time, and posts the largest score and its id on a board; each program reads what all have posted and
knows the best of all. A post is words that are never zero, written once, so whoever reads one has
it: nothing is counted, and nobody waits for another's stores to be seen. Posts are taken back as
soon as everyone has moved on, so that the board is zeros again when the launch ends.

What does not depend on the previous draft, noise included, is on its way before. Scores are those
of the portable form: logits are fp32, scores of drawn requests fp64, so the best does not depend on
who asks. Without a board a slot is a launch. Ranks exchange between slots: the portable form serves
groups of them.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.core.group import Group
from tercel.core.sampling import Stream
from tercel.ops._lib.kernel_best import NEVER, id_of, word
from tercel.ops._lib.kernel_meeting import PROGRAMS, can_meet
from tercel.ops._lib.kernel_philox import gumbel
from tercel.ops.spec.markov_chain import portable

REQUESTS = 64
"""Requests of a tile at most."""
ROWS = 16
"""Rows of a tensor core's product."""
BLOCK = 128
"""Ids per tile at most; 80 programs hold one each of a sixteenth of Kimi K3's vocabulary."""
LEAST = 64
CHUNK = 64
"""Of the rank, per product."""
NUM_WARPS = 8
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
    board: torch.Tensor | None = None,
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
    posts = num_drafts * requests * programs * (1 if greedy else 2)
    rank = 0 if w1 is None else w1.shape[1]
    meets = can_meet(board, posts)
    if not meets:
        board = torch.empty(posts, dtype=torch.int64, device=base.device)
    batch = min(triton.next_power_of_2(requests), REQUESTS)
    for first, last in ((0, num_drafts),) if meets else ((i, i + 1) for i in range(num_drafts + 1)):
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
            board,
            anchors.stride(0),
            requests,
            vocabulary,
            first,
            last,
            SLOTS=num_drafts,
            D=rank,
            CHUNK=min(triton.next_power_of_2(max(rank, 16)), CHUNK),
            TILES=tiles,
            BLOCK=block,
            BATCH=batch,
            ROWS=max(batch, ROWS),
            PARTS=triton.next_power_of_2(programs),
            GREEDY=greedy,
            MEETS=meets,
            num_warps=NUM_WARPS,
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
def _wide_word(score):
    """fp64 scores as integers that order alike, none of them 0."""
    bits = (score + 0.0).to(tl.int64, bitcast=True)  # one zero
    ordered = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    return tl.where(ordered >= 0, ordered + 1, ordered)


@triton.jit
def _posted(board, at, there, MEETS: tl.constexpr):
    """What lies at `at`, when all of it does."""
    words = tl.load(board + at, mask=there, other=1, volatile=True)
    if MEETS:
        while tl.sum(tl.sum((words == 0).to(tl.int32), 1), 0) > 0:
            words = tl.load(board + at, mask=there, other=1, volatile=True)
    return words


@triton.jit
def _draft(
    board,
    tokens,
    slot,
    request,
    requests,
    vocabulary,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    GREEDY: tl.constexpr,
    MEETS: tl.constexpr,
):
    """[BATCH] the id of the slot's largest score, the lowest of several; program 0 writes it."""
    part, programs = tl.arange(0, PARTS), tl.num_programs(0)
    real = request < requests
    there = real[:, None] & (part < programs)[None, :]
    at = (slot * requests + request).to(tl.int64)[:, None] * programs + part[None, :]
    value = _posted(board, at, there, MEETS)
    value = tl.where(there, value, NEVER)
    most = tl.max(value, 1)
    if GREEDY:
        found = id_of(most)
    else:
        ids = _posted(board, at + SLOTS * requests * programs, there, MEETS)
        found = tl.min(tl.where(value == most[:, None], ids - 1, vocabulary), 1)
    if tl.program_id(0) == 0:
        tl.store(tokens + request.to(tl.int64) * SLOTS + slot, found, mask=real)
    return tl.where(real, found, 0)


@triton.jit
def _clear(board, first, count, requests, programs, SLOTS: tl.constexpr, GREEDY: tl.constexpr):
    """Takes back `count` posts from `first` on."""
    for start in range(0, count, 1024):
        at = start + tl.arange(0, 1024)
        nothing = tl.zeros((1024,), tl.int64)
        tl.store(board + first + at, nothing, mask=at < count)
        if not GREEDY:
            ids = board + SLOTS * requests * programs
            tl.store(ids + first + at, nothing, mask=at < count)


@triton.jit(do_not_specialize=("anchor_step", "requests", "first", "last"))
def _chain(
    base,  # [requests * SLOTS, vocabulary] f32
    anchors,  # [requests] i64, `anchor_step` apart
    w1,  # [vocabulary, D] act, or None: no bias
    w2,  # [vocabulary, D] act
    temperature,  # [requests] f32
    seeds,  # [requests] i64
    positions,  # [requests] i64
    tokens,  # [requests, SLOTS] i64
    logits,  # [requests * SLOTS, vocabulary] f32
    board,  # [SLOTS, requests, programs] i64 zeros, as many again where not GREEDY
    anchor_step,
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
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    GREEDY: tl.constexpr,
    MEETS: tl.constexpr,
):
    """Slots first .. last - 1; the last draft is chosen where slot SLOTS would begin."""
    part, programs = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, BLOCK)
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    COPIES: tl.constexpr = ROWS // BATCH
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
                top = tl.full((BATCH,), float("-inf"), tl.float64)
                index = tl.full((BATCH,), 0, tl.int32) + vocabulary
            else:
                words = tl.full((BATCH,), NEVER, tl.int64)
            for tile in tl.static_range(TILES):
                at = start + tile * BLOCK + n
                inside = real[:, None] & (at < vocabulary)[None, :]
                there = line[:, None] * vocabulary + at[None, :]
                row = tl.load(base + there, mask=inside, other=float("-inf"))
                if not GREEDY:
                    noise = gumbel(seed, position, stream, start + tile * BLOCK, BATCH, BLOCK)
                if tile == 0:
                    if slot == 0:
                        previous = tl.load(anchors + request * anchor_step, mask=real, other=0)
                    else:
                        previous = _draft(
                            board, tokens, slot - 1, request, requests, vocabulary,
                            SLOTS, PARTS, GREEDY, MEETS,
                        )  # fmt: skip
                if w2 is not None:
                    # A product has at least 16 rows; those that repeat a request are zeros.
                    source = tl.broadcast_to(previous[None, :], (COPIES, BATCH))
                    source = tl.reshape(source, (ROWS,))
                    row_of = tl.arange(0, ROWS)
                    used = (row_of < BATCH) & (g * BATCH + row_of < requests)
                    # Chunks meet in fp32: a tensor core's own sums are cut off.
                    bias = tl.zeros((ROWS, BLOCK), tl.float32)
                    for chunk in tl.static_range(CHUNKS):
                        k = chunk * CHUNK + tl.arange(0, CHUNK)
                        here = w1 + source[:, None] * D + k[None, :]
                        up = tl.load(here, mask=used[:, None] & (k < D)[None, :], other=0.0)
                        if TILES == 1:
                            down = held[chunk]
                        else:
                            down = _weights(w2, at, chunk, vocabulary, D, CHUNK)
                        bias += tl.dot(up, tl.trans(down), input_precision="ieee")
                    row += tl.sum(tl.reshape(bias, (COPIES, BATCH, BLOCK)), 0)
                tl.store(logits + there, row, mask=inside)
                row = tl.where(inside & (row == row), row, float("-inf"))
                if GREEDY:
                    found = tl.max(tl.where(inside, word(row, at[None, :]), words[:, None]), 1)
                    words = tl.maximum(words, found)
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
            own = (slot * requests + request).to(tl.int64) * programs + part
            if GREEDY:
                tl.store(board + own, words, mask=real)
            else:
                tl.store(board + own, _wide_word(top), mask=real)
                ids = board + SLOTS * requests * programs
                tl.store(ids + own, index.to(tl.int64) + 1, mask=real)
    if (part == 0) & ((last > SLOTS) | MEETS):
        for g in range(groups):
            request = g * BATCH + tl.arange(0, BATCH)
            _draft(
                board, tokens, SLOTS - 1, request, requests, vocabulary,
                SLOTS, PARTS, GREEDY, MEETS,
            )  # fmt: skip
    if MEETS:
        # Who posts a slot has read the one before it. This program has read all posts of slot
        # SLOTS - 2, so nobody reads those before any more; program 0 has read the last ones.
        for slot in range(0, SLOTS - 2):
            for g in range(groups):
                request = g * BATCH + tl.arange(0, BATCH)
                own = (slot * requests + request).to(tl.int64) * programs + part
                nothing = tl.zeros((BATCH,), tl.int64)
                tl.store(board + own, nothing, mask=request < requests)
                if not GREEDY:
                    ids = board + SLOTS * requests * programs
                    tl.store(ids + own, nothing, mask=request < requests)
        if part == 0:
            tl.debug_barrier()
            begin = (SLOTS - 2 if SLOTS > 2 else 0) * requests * programs
            count = SLOTS * requests * programs - begin
            _clear(board, begin, count, requests, programs, SLOTS, GREEDY)
