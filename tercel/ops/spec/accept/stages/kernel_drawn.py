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
from tercel.ops._lib.kernel_meeting import PROGRAMS, arrive, can_meet, wait
from tercel.ops._lib.kernel_philox import uniform
from tercel.ops.spec.accept.contract import MEETINGS
from tercel.ops.spec.accept.stages.kernel_greedy import keep_matches
from tercel.ops.spec.accept.stages.kernel_parts import greedy, passed, search, survey, whole
from tercel.ops.spec.accept.stages.kernel_rejection import FACTS, decide, over_part, pick, plan

PER_SM = 2
"""Programs on a multiprocessor: one computes while the other's logits are on their way."""
REGISTERS = 128
"""Of a thread, so that they fit."""
TILE = 128
"""Ids of a tile of all rows of a request."""
TARGET = tl.constexpr(int(Stream.TARGET))


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
            drafts.stride(0),
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


@triton.jit(do_not_specialize=("draft_step", "requests"))
def _accept(
    logits,  # [requests * (G + 1), vocabulary] f32
    drafts,  # [requests, G] i64, rows `draft_step` apart
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
    draft_step,
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
            top, index, mass = survey(
                logits + r * (G + 1) * vocabulary,
                real, first, last, vocabulary, heat, ROWS, TILE, TILES,
            )  # fmt: skip
            tl.store(largest + line, top, mask=real)
            tl.store(ids + line, index, mask=real)
            tl.store(masses + line, mass, mask=real)
            if draft_logits is not None:  # noqa: SIM102 -- the outer one is known when compiled
                if heat > 0.0:
                    top, _, mass = survey(
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
            own_drafts = drafts + r * draft_step
            heat = tl.load(temperature + r)
            seed, position = tl.load(seeds + r), tl.load(positions + r)
            if (RULE == "match") or (heat == 0.0):
                line = r * (G + 1) + row
                token, is_finite = greedy(largest, ids, line, parts, vocabulary, real, PARTS)
                if RULE == "match":  # noqa: SIM102 -- the outer one is known when compiled
                    if heat > 0.0:
                        most, is_finite, mass = whole(
                            largest, masses, line, parts, heat, real, PARTS
                        )
                        u = uniform(seed, position + 1 + row, row * 0 + TARGET)
                        chosen, goal, before = passed(mass, u, parts, PARTS)
                        nothing = goal * 0.0
                        token = search(
                            logits + r * (G + 1) * vocabulary, None,
                            most, nothing + 1.0, most, nothing, chosen * 0 + vocabulary, heat,
                            goal, before, chosen * span, span, vocabulary, TILE, TILES, ROWS,
                        )  # fmt: skip
                draft = tl.load(own_drafts + row, mask=slot, other=0)
                drafted = slot & (row < tl.load(num_drafts + r))
                keep_matches(tokens, accepted, finite, r, token, is_finite, draft, drafted, G, ROWS)
            else:
                plan(
                    logits, own_drafts, draft_logits, num_drafts, largest, masses, facts, r,
                    requests, heat, seed, position, vocabulary, parts, G, ROWS, PARTS, RULE,
                )  # fmt: skip
        if MEETS and (LAST > 2):  # noqa: SIM102 -- the outer one is known when compiled
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
                    if pick(wanted, row, j) > 0.0:
                        over_part(
                            logits, drafts + r * draft_step, draft_logits, facts, over, r, j,
                            heat, first, last, vocabulary, part, parts, G, ROWS, SPAN,
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
                decide(
                    logits, drafts + r * draft_step, draft_logits, num_drafts, tokens, accepted,
                    finite, largest, masses, over, facts, r, heat, tl.load(seeds + r),
                    tl.load(positions + r), vocabulary, span, parts, G, ROWS, SPAN, PARTS, RULE,
                )  # fmt: skip

    if MEETS:  # noqa: SIM102 -- the outer one is known when compiled
        if own < requests:
            deciders = tl.minimum(tl.cdiv(requests - group, groups), parts)
            if arrive(counters + 3) == deciders - 1:  # nobody waits any more
                for meeting in tl.static_range(MEETINGS):
                    tl.store(counters + meeting, 0)
