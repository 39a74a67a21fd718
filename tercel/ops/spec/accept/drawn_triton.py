"""Requests with temperatures: the programs of one launch meet, and one of them decides a request.

Programs have parts of the vocabulary, as many whatever the batch, so a request's result depends on
its own rows alone. A large batch, or a small vocabulary, has groups of requests side by side.

    1. all: of each row of the target, and of the drafter, the largest logit and the mass relative
       to it; of a greedy request's the first id of the largest
    2. a request's decider: what does not need the vocabulary again, such as sample-match's draws
    3. all, for rejecting rules: of rows that may be the last, what p has over q
    4. the decider: which is the last, and the token after its drafts

Parts are taken in id order, and atomics count programs only, so bits repeat. Without counters a
stage is a launch.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.core.sampling import Stream
from tercel.ops._lib.kernel_exp import masses as mass_of
from tercel.ops._lib.kernel_meeting import PROGRAMS, arrive, can_meet, wait
from tercel.ops._lib.kernel_philox import uniform
from tercel.ops.spec.accept import rules
from tercel.ops.spec.accept.contract import MEETINGS
from tercel.ops.spec.accept.greedy_triton import keep_matches, store_result

PER_SM = 2
"""Programs on a multiprocessor: one computes while the other's logits are on their way."""
REGISTERS = 128
"""Of a thread, so that they fit."""
TILE = 128
"""Ids of a tile of all rows of a request."""
FACTS = tl.constexpr(8)
"""fp64 numbers per row that the second stage leaves for the others."""
TARGET = tl.constexpr(int(Stream.TARGET))
ACCEPT = tl.constexpr(int(Stream.ACCEPT))
RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))
NOTHING = tl.constexpr(rules.NOTHING)


def accept_drawn(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    num_drafts: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rule: str,
    counters: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Fills `results` of op accept for requests that do not filter."""
    requests, slots = drafts.shape
    vocabulary, rows = logits.shape[1], slots + 1
    most_programs = PER_SM * PROGRAMS
    tiles = triton.cdiv(triton.cdiv(vocabulary, TILE), most_programs)
    parts = triton.cdiv(vocabulary, tiles * TILE)
    groups = min(requests, most_programs // parts)
    lines = requests * rows * (1 if draft_logits is None else 2)
    padded = triton.next_power_of_2(rows)

    def scratch(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    largest = scratch(lines, parts, dtype=torch.float32)
    ids = scratch(requests * rows, parts, dtype=torch.int32)
    masses, over = scratch(lines, parts), scratch(requests * rows, parts)
    facts = scratch(requests, FACTS.value, padded)
    stages = (1, 2) if rule == "match" else (1, 2, 3, 4)
    meets = can_meet(counters, MEETINGS * groups)
    for first, last in ((1, stages[-1]),) if meets else ((i, i) for i in stages):
        _accept[(parts, groups)](
            logits,
            drafts,
            draft_logits,
            num_drafts,
            temperature,
            seeds,
            positions,
            *results,
            largest,
            ids,
            masses,
            over,
            facts,
            counters,
            vocabulary,
            requests,
            G=slots,
            ROWS=padded,
            TILE=TILE,
            TILES=tiles,
            SPAN=triton.next_power_of_2(tiles * TILE),
            PARTS=triton.next_power_of_2(parts),
            RULE=rule,
            FIRST=first,
            LAST=last,
            MEETINGS=MEETINGS,
            num_warps=8,
            maxnreg=REGISTERS,
            launch_pdl=True,
        )


@triton.jit
def _pick(values, row, j):
    """values[j] of a vector."""
    return tl.sum(tl.where(row == j, values, tl.zeros_like(values)), 0)


@triton.jit
def _survey(
    source,  # rows of logits, the first at `source`
    real,  # [ROWS] which rows there are
    first,
    last,
    vocabulary,
    heat,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """(largest, its first id, mass relative to it) of each row's part; the id of greedy requests,
    of which heat is 0, the mass of others. NaN counts as +inf: neither is finite."""
    row = tl.arange(0, ROWS).to(tl.int64)
    held = ()
    top = tl.full((ROWS, TILE), float("-inf"), tl.float32)
    for tile in tl.static_range(TILES):
        at = first + tile * TILE + tl.arange(0, TILE)
        there = real[:, None] & (at < last)[None, :]
        here = source + row[:, None] * vocabulary + at[None, :]
        values = tl.load(here, mask=there, other=float("-inf"))
        values = tl.where(values == values, values, float("inf"))
        top = tl.maximum(top, values)
        held = held + (values,)  # noqa: RUF005
    most = tl.max(top, 1)
    index = tl.full((ROWS,), 0, tl.int32) + vocabulary
    mass = tl.zeros((ROWS,), tl.float64)
    if heat == 0.0:
        for tile in tl.static_range(TILES):
            at = first + tile * TILE + tl.arange(0, TILE)
            found = tl.where(held[tile] == most[:, None], at[None, :], vocabulary)
            index = tl.minimum(index, tl.min(found, 1))
    else:
        sums = tl.zeros((ROWS, TILE), tl.float64)
        for tile in tl.static_range(TILES):
            sums += mass_of(held[tile], most[:, None], heat)
        mass = tl.sum(sums, 1)
    return most, index, mass


@triton.jit
def _whole(largest, masses, line, parts, heat, real, PARTS: tl.constexpr):
    """Of rows `line`: (largest of all parts, 0 where that is not finite; whether it is; [ROWS,
    PARTS] the parts' masses, relative to it)."""
    part = tl.arange(0, PARTS)
    at = line[:, None] * parts + part[None, :]
    there = real[:, None] & (part < parts)[None, :]
    tops = tl.load(largest + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(masses + at, mask=there, other=0.0, cache_modifier=".cg")
    most = tl.max(tops, 1)
    finite = tl.abs(most) < float("inf")
    most = tl.where(finite, most, 0.0)
    mass = tl.where(finite[:, None], mass * mass_of(tops, most[:, None], heat), 0.0)
    return most, finite, mass


@triton.jit
def _greedy(largest, ids, line, parts, vocabulary, real, PARTS: tl.constexpr):
    """(the first id of the largest logit, whether that is finite) of rows `line`."""
    part = tl.arange(0, PARTS)
    at = line[:, None] * parts + part[None, :]
    there = real[:, None] & (part < parts)[None, :]
    tops = tl.load(largest + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    index = tl.load(ids + at, mask=there, other=vocabulary, cache_modifier=".cg")
    most = tl.max(tops, 1)
    own = tl.min(tl.where(tops == most[:, None], index, vocabulary), 1)
    return own.to(tl.int64), tl.abs(most) < float("inf")


@triton.jit
def _passed(mass, target, parts, PARTS: tl.constexpr):
    """Of rows of masses [ROWS, PARTS]: (the part in which the cumulative mass passes the row's
    target, a share of all; that target; the mass before the part)."""
    part = tl.arange(0, PARTS)
    upto = tl.cumsum(mass, 1)
    goal = target * tl.max(upto, 1)
    chosen = tl.minimum(tl.sum((upto <= goal[:, None]).to(tl.int32), 1), parts - 1)
    before = tl.max(tl.where(part[None, :] < chosen[:, None], upto, 0.0), 1)
    return chosen, goal, before


@triton.jit
def _search(
    source,  # rows of logits, the first at `source`
    q_source,  # of q, or None
    most,  # [ROWS], as all below
    scale,  # of p
    q_most,
    q_scale,  # of q; 0: none
    certain,  # id of which q is 1; vocabulary: none
    heat,
    goal,
    before,
    first,
    span,
    vocabulary,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The first id from `first` on whose cumulative mass max(p - q, 0) passes the goal; where sums
    round to less than the part's mass, its last id that has any."""
    row = tl.arange(0, ROWS).to(tl.int64)[:, None]
    found = tl.full((ROWS,), 0, tl.int32) + vocabulary
    held = tl.full((ROWS,), 0, tl.int32)
    last = tl.minimum(first + span, vocabulary)
    ours, theirs = (), ()
    for tile in tl.static_range(TILES):  # all on their way before the first is needed
        at = first[:, None] + (tile * TILE + tl.arange(0, TILE))[None, :]
        there = at < last[:, None]
        values = tl.load(source + row * vocabulary + at, mask=there, other=float("-inf"))
        ours = ours + (values,)  # noqa: RUF005
        if q_source is not None:
            there = there & (q_scale > 0.0)[:, None]
            values = tl.load(q_source + row * vocabulary + at, mask=there, other=float("-inf"))
            theirs = theirs + (values,)  # noqa: RUF005
    for tile in tl.static_range(TILES):
        at = first[:, None] + (tile * TILE + tl.arange(0, TILE))[None, :]
        mass = mass_of(ours[tile], most[:, None], heat) * scale[:, None]
        if q_source is not None:
            mass -= mass_of(theirs[tile], q_most[:, None], heat) * q_scale[:, None]
        mass -= (at == certain[:, None]).to(tl.float64)
        mass = tl.maximum(mass, 0.0)
        upto = before[:, None] + tl.cumsum(mass, 1)
        some = mass > 0.0
        held = tl.maximum(held, tl.max(tl.where(some, at, 0), 1))
        passed = (upto > goal[:, None]) & some
        found = tl.minimum(found, tl.min(tl.where(passed, at, vocabulary), 1))
        before = tl.max(upto, 1)
    return tl.where(found == vocabulary, held, found).to(tl.int64)


@triton.jit
def _plan(
    logits,
    drafts,
    draft_logits,
    num_drafts,
    largest,
    masses,
    facts,
    r,
    requests,
    heat,
    seed,
    position,
    vocabulary,
    parts,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    RULE: tl.constexpr,
):
    """What a rejecting rule knows of a request before it has seen what p has over q."""
    row = tl.arange(0, ROWS)
    line = r * (G + 1) + row
    real, slot = row <= G, row < G
    draft = tl.load(drafts + r * G + row, mask=slot, other=0)
    drafted = slot & (row < tl.load(num_drafts + r))
    most, is_finite, mass = _whole(largest, masses, line, parts, heat, real, PARTS)
    total = tl.where(is_finite, tl.sum(mass, 1), 1.0)
    value = tl.load(logits + line * vocabulary + draft, mask=slot, other=float("-inf"))
    p = tl.where(is_finite, mass_of(value, most, heat) / total, 0.0)
    q = drafted.to(tl.float64)
    q_most, q_scale = most * 0.0, q * 0.0
    if draft_logits is not None:
        q_line = line + requests * (G + 1)
        q_most, q_finite, q_mass = _whole(largest, masses, q_line, parts, heat, slot, PARTS)
        drafted = drafted & q_finite
        q_total = tl.where(q_finite, tl.sum(q_mass, 1), 1.0)
        value = tl.load(
            draft_logits + (r * G + row) * vocabulary + draft, mask=slot, other=float("-inf")
        )
        q_scale = tl.where(drafted, 1.0 / q_total, 0.0)
        q = tl.where(drafted, mass_of(value, q_most, heat) / q_total, 0.0)
    ratio = tl.where(q > 0.0, p / tl.where(q > 0.0, q, 1.0), 0.0)
    u = uniform(seed, position + row * 0, row * 0 + ACCEPT + row)
    share = tl.full((ROWS,), 1.0, tl.float64)
    bare = is_finite & (drafted == 0)  # drawn from as it is
    if RULE == "token":
        kept = (u < tl.minimum(ratio, 1.0)) & slot
        number = tl.min(tl.where(kept, G, row), 0)
        wanted = row == number
    else:
        block = tl.sum(ratio * 0.0, 0) + 1.0
        for j in tl.static_range(G):
            block = tl.minimum(block * _pick(ratio, row, j), 1.0)
            share = tl.where(row == j + 1, block, share)
        # The number of the draft before a row: the block that ends there is kept where it is below
        # its threshold, which is at most its share, and all of that where the share is 1.
        u = uniform(seed, position + row * 0, row * 0 + ACCEPT + tl.maximum(row - 1, 0))
        may = (u < share) | (row == 0)
        sure = may & ((share == 1.0) | bare | (row == G))
        surest = tl.max(tl.where(sure & real, row, 0), 0)
        wanted = may & (row >= surest)
    wanted = tl.where(bare, -1.0, (wanted & drafted & is_finite).to(tl.float64))
    at = facts + r * (FACTS * ROWS) + row
    tl.store(at, most.to(tl.float64))
    tl.store(at + ROWS, share / total)
    tl.store(at + 2 * ROWS, q_most.to(tl.float64))
    tl.store(at + 3 * ROWS, q_scale)
    tl.store(at + 4 * ROWS, wanted)
    tl.store(at + 5 * ROWS, is_finite.to(tl.float64))
    if RULE == "token":
        tl.store(at + 6 * ROWS, (row * 0 + number).to(tl.float64))
    else:
        tl.store(at + 6 * ROWS, share)
        tl.store(at + 7 * ROWS, u)


@triton.jit
def _over(
    logits,
    drafts,
    draft_logits,
    facts,
    over,
    r,
    j,
    heat,
    first,
    last,
    vocabulary,
    part,
    parts,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Of row j: what p, scaled by the share of the block, has over q in this part."""
    at = first + tl.arange(0, SPAN)
    there = at < last
    line = r * (G + 1) + j
    values = tl.load(logits + line * vocabulary + at, mask=there, other=float("-inf"))
    fact = facts + r * (FACTS * ROWS) + j
    most = tl.load(fact, cache_modifier=".cg").to(tl.float32)
    rest = mass_of(values, most, heat) * tl.load(fact + ROWS, cache_modifier=".cg")
    if draft_logits is None:
        rest -= (at == tl.load(drafts + r * G + j)).to(tl.float64)
    else:
        others = draft_logits + (r * G + j) * vocabulary + at
        others = tl.load(others, mask=there, other=float("-inf"))
        most = tl.load(fact + 2 * ROWS, cache_modifier=".cg").to(tl.float32)
        rest -= mass_of(others, most, heat) * tl.load(fact + 3 * ROWS, cache_modifier=".cg")
    tl.store(over + line * parts + part, tl.sum(tl.maximum(rest, 0.0), 0))


@triton.jit
def _decide(
    logits,
    drafts,
    draft_logits,
    num_drafts,
    tokens,
    accepted,
    finite,
    largest,
    masses,
    over,
    facts,
    r,
    heat,
    seed,
    position,
    vocabulary,
    span,
    parts,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    RULE: tl.constexpr,
):
    """The last row of a request, and the token drawn there from what rejection left."""
    row, column = tl.arange(0, ROWS), tl.arange(0, PARTS)
    line = r * (G + 1) + row
    fact = facts + r * (FACTS * ROWS) + row
    kind = tl.load(fact + 4 * ROWS, cache_modifier=".cg")
    wanted = kind > 0.0
    is_finite = tl.load(fact + 5 * ROWS, cache_modifier=".cg") > 0.0
    there = wanted[:, None] & (column < parts)[None, :]
    rests = over + line[:, None] * parts + column[None, :]
    rests = tl.load(rests, mask=there, other=0.0, cache_modifier=".cg")
    rest = tl.sum(rests, 1)
    known = tl.load(fact + 6 * ROWS, cache_modifier=".cg")
    if RULE == "token":
        number = tl.max(known, 0).to(tl.int32)
    else:  # `known` are shares
        u = tl.load(fact + 7 * ROWS, cache_modifier=".cg")
        inner = rest / tl.where(known == 1.0, 1.0, rest + 1.0 - known)
        threshold = tl.where((known == 1.0) | (kind < 0.0) | (row == G), known, inner)
        number = tl.max(tl.where((u < threshold) & (row > 0) & (row <= G), row, 0), 0)
    whole = (_pick(wanted.to(tl.int32), row, number) == 0) | (_pick(rest, row, number) <= NOTHING)

    # From here on one row, at the first place of vectors.
    one = tl.arange(0, 1)
    own_line = r * (G + 1) + number + one
    some = one == 0
    most, _, mass = _whole(largest, masses, own_line, parts, heat, some, PARTS)
    left = tl.sum(tl.where((row == number)[:, None], rests, 0.0), 0)[None, :]
    mass = tl.where(whole, mass, left)
    plain = uniform(seed, position + 1, number * 0 + TARGET)
    rejected = uniform(seed, position, number * 0 + RESIDUAL)
    u = tl.where(tl.load(num_drafts + r) == 0, plain, rejected)
    chosen, goal, before = _passed(mass, u, parts, PARTS)
    fact = facts + r * (FACTS * ROWS) + number + one
    scale = tl.where(whole, 1.0, tl.load(fact + ROWS, cache_modifier=".cg"))
    q_most = tl.load(fact + 2 * ROWS, cache_modifier=".cg").to(tl.float32)
    q_scale = tl.where(whole, 0.0, tl.load(fact + 3 * ROWS, cache_modifier=".cg"))
    place = tl.minimum(number, G - 1)
    certain = tl.full((1,), 0, tl.int64) + vocabulary
    q_source = None
    if draft_logits is None:
        certain = tl.where(whole, certain, tl.load(drafts + r * G + place))
    else:
        q_source = draft_logits + (r * G + place) * vocabulary
    token = _search(
        logits + (r * (G + 1) + number) * vocabulary,
        q_source,
        most,
        scale,
        q_most,
        q_scale,
        certain,
        heat,
        goal,
        before,
        chosen * span,
        span,
        vocabulary,
        SPAN,
        1,
        1,
    )
    own = tl.zeros((ROWS,), tl.int64) + tl.sum(token, 0)
    draft = tl.load(drafts + r * G + row, mask=row < G, other=0)
    store_result(tokens, accepted, finite, r, number, own, is_finite, draft, G, ROWS)


@triton.jit(do_not_specialize=("requests",))
def _accept(
    logits,  # [requests * (G + 1), vocabulary] f32
    drafts,  # [requests, G] i64
    draft_logits,  # [requests * G, vocabulary] f32, or None: q is 1 on the draft
    num_drafts,  # [requests] i64
    temperature,  # [requests] f32
    seeds,  # [requests] i64
    positions,  # [requests] i64
    tokens,  # [requests, G + 1] i64
    accepted,  # [requests] i64
    finite,  # [requests] bool
    largest,  # [requests * (G + 1), parts] f32, then as many of q
    ids,  # [requests * (G + 1), parts] i32
    masses,  # as largest, f64
    over,  # [requests * (G + 1), parts] f64
    facts,  # [requests, FACTS, ROWS] f64
    counters,  # [groups, MEETINGS] i32 zeros
    vocabulary,
    requests,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    RULE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    MEETINGS: tl.constexpr,
):
    """Stages FIRST .. LAST; all of them in one launch, or each alone."""
    MEETS: tl.constexpr = FIRST < LAST
    part, parts = tl.program_id(0), tl.num_programs(0)
    group, groups = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, ROWS)
    real, slot = row <= G, row < G
    span = TILES * TILE
    first = part * span
    last = tl.minimum(first + span, vocabulary)
    counters += group * MEETINGS
    own = group + groups * part  # the first request that this program decides
    wide = group.to(tl.int64) * 0
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()

    if FIRST == 1:
        for request in range(group, requests, groups):
            r = wide + request
            heat = tl.load(temperature + r)
            line = (r * (G + 1) + row) * parts + part
            top, index, mass = _survey(
                logits + r * (G + 1) * vocabulary,
                real, first, last, vocabulary, heat, ROWS, TILE, TILES,
            )  # fmt: skip
            tl.store(largest + line, top, mask=real)
            tl.store(ids + line, index, mask=real)
            tl.store(masses + line, mass, mask=real)
            if draft_logits is not None:
                if heat > 0.0:
                    top, _, mass = _survey(
                        draft_logits + r * G * vocabulary,
                        slot, first, last, vocabulary, heat, ROWS, TILE, TILES,
                    )  # fmt: skip
                    line += requests * (G + 1) * parts
                    tl.store(largest + line, top, mask=slot)
                    tl.store(masses + line, mass, mask=slot)
        if MEETS:
            arrive(counters)
            if own < requests:
                wait(counters, parts)

    if (FIRST <= 2) and (LAST >= 2):
        for request in range(own, requests, groups * parts):
            r = wide + request
            heat = tl.load(temperature + r)
            seed, position = tl.load(seeds + r), tl.load(positions + r)
            if (RULE == "match") or (heat == 0.0):
                line = r * (G + 1) + row
                token, is_finite = _greedy(largest, ids, line, parts, vocabulary, real, PARTS)
                if RULE == "match":
                    if heat > 0.0:
                        most, is_finite, mass = _whole(
                            largest, masses, line, parts, heat, real, PARTS
                        )
                        u = uniform(seed, position + 1 + row, row * 0 + TARGET)
                        chosen, goal, before = _passed(mass, u, parts, PARTS)
                        nothing = goal * 0.0
                        token = _search(
                            logits + r * (G + 1) * vocabulary, None,
                            most, nothing + 1.0, most, nothing, chosen * 0 + vocabulary, heat,
                            goal, before, chosen * span, span, vocabulary, TILE, TILES, ROWS,
                        )  # fmt: skip
                draft = tl.load(drafts + r * G + row, mask=slot, other=0)
                drafted = slot & (row < tl.load(num_drafts + r))
                keep_matches(
                    tokens, accepted, finite, r, token, is_finite, draft, drafted, G, ROWS
                )
            else:
                _plan(
                    logits, drafts, draft_logits, num_drafts, largest, masses, facts, r, requests,
                    heat, seed, position, vocabulary, parts, G, ROWS, PARTS, RULE,
                )  # fmt: skip
        if MEETS and (LAST > 2):
            if own < requests:
                arrive(counters + 1)

    if (FIRST <= 3) and (LAST >= 3):
        if MEETS:
            in_group = tl.cdiv(requests - group, groups)
            wait(counters + 1, tl.minimum(in_group, parts))
        for request in range(group, requests, groups):
            r = wide + request
            heat = tl.load(temperature + r)
            if heat > 0.0:
                wanted = tl.load(facts + (r * FACTS + 4) * ROWS + row, cache_modifier=".cg")
                for j in range(G):
                    if _pick(wanted, row, j) > 0.0:
                        _over(
                            logits, drafts, draft_logits, facts, over, r, j, heat, first, last,
                            vocabulary, part, parts, G, ROWS, SPAN,
                        )  # fmt: skip
        if MEETS:
            arrive(counters + 2)
            if own < requests:
                wait(counters + 2, parts)

    if LAST == 4:
        for request in range(own, requests, groups * parts):
            r = wide + request
            heat = tl.load(temperature + r)
            if heat > 0.0:
                _decide(
                    logits, drafts, draft_logits, num_drafts, tokens, accepted, finite,
                    largest, masses, over, facts, r, heat, tl.load(seeds + r),
                    tl.load(positions + r), vocabulary, span, parts, G, ROWS, SPAN, PARTS, RULE,
                )  # fmt: skip

    if MEETS:
        if own < requests:
            deciders = tl.minimum(tl.cdiv(requests - group, groups), parts)
            if arrive(counters + 3) == deciders - 1:  # nobody waits any more
                for meeting in tl.static_range(MEETINGS):
                    tl.store(counters + meeting, 0)
