"""spec/accept without filters: one launch, in which the programs of a request meet at most twice.

Each program has a part of the vocabulary, of all rows of one request.

    1. of each row: the largest logit and its first id; in fp64 the mass relative to it, also of q
       The programs wait for each other, except where every row is greedy.
    2. match: a row's draw, by the program in whose part it lies
       token: of the row after the kept drafts, what p has over q; block: of all rows
    3. The last program to get there decides, and draws what rejection left.

Parts are taken in id order, and the only atomics count programs, so bits repeat and a request's
result depends on its own rows alone. A small vocabulary, or a large batch, has a program per
request and no meeting. Without counters a stage is a launch. Requests that filter need a sort, and
ranks an exchange: the portable form serves them.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from tercel.core.group import Group
from tercel.core.sampling import Stream
from tercel.ops._lib.kernel_meeting import PROGRAMS, arrive, can_meet, wait
from tercel.ops._lib.kernel_philox import uniform
from tercel.ops.spec.accept import portable, rules

TILE = 512
"""Ids of a tile of all rows of a request."""
SMALL = 4096
"""A vocabulary up to which one program holds a request."""
TARGET = tl.constexpr(int(Stream.TARGET))
ACCEPT = tl.constexpr(int(Stream.ACCEPT))
RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))
NOTHING = tl.constexpr(rules.NOTHING)


def accept(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    num_drafts: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    group: Group,
    rule: str,
    filtered: bool,
    greedy: bool = False,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if filtered or group.world_size > 1:
        given = (logits, drafts, draft_logits, num_drafts, temperature, top_k, top_p, min_p)
        options = {"group": group, "rule": rule, "filtered": filtered, "greedy": greedy}
        return portable.accept(*given, seeds, positions, **options)
    requests, slots = drafts.shape
    vocabulary, rows = logits.shape[1], slots + 1
    tokens = torch.empty(requests, rows, dtype=torch.int64, device=logits.device)
    accepted = torch.empty(requests, dtype=torch.int64, device=logits.device)
    finite = torch.empty(requests, dtype=torch.bool, device=logits.device)
    if not requests:
        return tokens, accepted, finite
    rule = "greedy" if greedy else rule
    parts = 1 if vocabulary <= SMALL else max(PROGRAMS // requests, 1)
    span = triton.cdiv(triton.cdiv(vocabulary, parts), TILE) * TILE
    parts = triton.cdiv(vocabulary, span)
    both = rule in ("token", "block") and draft_logits is not None
    lines = requests * rows * (2 if both else 1)
    largest = torch.empty(lines, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(requests * rows, parts, dtype=torch.int32, device=logits.device)
    masses = torch.empty(lines, parts, dtype=torch.float64, device=logits.device)
    over = torch.empty(requests * rows, parts, dtype=torch.float64, device=logits.device)
    drawn = torch.empty(requests * rows, dtype=torch.int32, device=logits.device)
    together = parts == 1 or can_meet(counters, 2 * requests)
    stages = ((1, 3),)
    if not together:
        stages = ((1, 1), (3, 3)) if greedy else ((1, 1), (2, 2), (3, 3))
    for first, last in stages:
        _accept[(parts, requests)](
            logits,
            drafts,
            draft_logits if both else None,
            num_drafts,
            temperature,
            seeds,
            positions,
            tokens,
            accepted,
            finite,
            largest,
            ids,
            masses,
            over,
            drawn,
            counters,
            vocabulary,
            span,
            requests,
            G=slots,
            ROWS=triton.next_power_of_2(rows),
            TILE=TILE,
            PARTS=triton.next_power_of_2(parts),
            ALONE=parts == 1,
            RULE=rule,
            FIRST=first,
            LAST=last,
            num_warps=8,
            launch_pdl=True,
        )
    return tokens, accepted, finite


@triton.jit
def _mass(values, most, heat):
    """fp64 masses relative to `most`, zero where barred; heat is never 0."""
    away = (values.to(tl.float64) - most.to(tl.float64)) / heat
    return tl.where(values == float("-inf"), 0.0, tl.exp(away))


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
    MASS: tl.constexpr,
):
    """(largest, NaN where a logit is; its first id; mass relative to it) of each row's part."""
    row = tl.arange(0, ROWS).to(tl.int64)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    index = tl.full((ROWS,), 0, tl.int32) + vocabulary
    mass = tl.zeros((ROWS,), tl.float64)
    broken = tl.zeros((ROWS,), tl.int32)
    for start in range(first, last, TILE):
        at = start + tl.arange(0, TILE)
        there = real[:, None] & (at < last)[None, :]
        here = source + row[:, None] * vocabulary + at[None, :]
        values = tl.load(here, mask=there, other=float("-inf"))
        broken = tl.maximum(broken, tl.max((values != values).to(tl.int32), 1))
        values = tl.where(values == values, values, float("-inf"))
        top = tl.max(values, 1)
        found = tl.min(tl.where(values == top[:, None], at[None, :], vocabulary), 1)
        index = tl.where(top > most, found, index)
        if MASS:
            new = tl.maximum(most, top)
            mass = mass * _mass(most, new, heat)
            mass += tl.sum(_mass(values, new[:, None], heat), 1)
        most = tl.maximum(most, top)
    return tl.where(broken > 0, float("nan"), most), index, mass


@triton.jit
def _whole(largest, masses, line, parts, heat, real, PARTS: tl.constexpr):
    """Of rows `line`: (largest of all parts, whether all are numbers and one is more than -inf,
    [ROWS, PARTS] the parts' masses, relative to it)."""
    part = tl.arange(0, PARTS)
    at = line[:, None] * parts + part[None, :]
    there = real[:, None] & (part < parts)[None, :]
    tops = tl.load(largest + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    broken = tl.max((tops != tops).to(tl.int32), 1) > 0
    tops = tl.where(tops == tops, tops, float("-inf"))
    most = tl.max(tops, 1)
    finite = (most - most == 0.0) & (broken == 0)
    mass = tl.load(masses + at, mask=there, other=0.0, cache_modifier=".cg")
    mass *= _mass(tops, tl.where(finite, most, 0.0)[:, None], heat)
    return most, finite, mass


@triton.jit
def _first_largest(largest, ids, line, parts, vocabulary, real, PARTS: tl.constexpr):
    """(its id, whether the row is finite) of rows `line`."""
    part = tl.arange(0, PARTS)
    at = line[:, None] * parts + part[None, :]
    there = real[:, None] & (part < parts)[None, :]
    tops = tl.load(largest + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    index = tl.load(ids + at, mask=there, other=vocabulary, cache_modifier=".cg")
    broken = tl.max((tops != tops).to(tl.int32), 1) > 0
    most = tl.max(tl.where(tops == tops, tops, float("-inf")), 1)
    own = tl.min(tl.where(tops == most[:, None], index, vocabulary), 1)
    return own, (most - most == 0.0) & (broken == 0)


@triton.jit
def _pick(values, row, j):
    """values[j] of a vector."""
    return tl.sum(tl.where(row == j, values, tl.zeros_like(values)), 0)


@triton.jit
def _passed(mass, target, parts, PARTS: tl.constexpr):
    """(the part in which the cumulative mass [PARTS] passes the target, the mass before it)."""
    part = tl.arange(0, PARTS)
    upto = tl.cumsum(mass, 0)
    chosen = tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), parts - 1)
    return chosen, tl.max(tl.where(part < chosen, upto, 0.0), 0)


@triton.jit
def _search(
    logits,  # the row
    q_logits,  # its q, or None
    most,
    scale,  # of p: share / whole mass
    q_most,
    q_scale,  # 1 / whole mass; 0: no q
    certain,  # id of which q is 1; vocabulary: none
    heat,
    target,
    before,
    first,
    last,
    vocabulary,
    TILE: tl.constexpr,
):
    """The first id from `first` on whose cumulative mass max(p - q, 0) passes the target."""
    found = vocabulary
    held = 0  # where sums round to less than the part's mass, its last token is meant
    start = first
    while (start < last) & (found == vocabulary):
        at = start + tl.arange(0, TILE)
        values = tl.load(logits + at, mask=at < last, other=float("-inf"))
        mass = _mass(values, most, heat) * scale
        if q_logits is not None:
            others = tl.load(q_logits + at, mask=at < last, other=float("-inf"))
            mass -= tl.where(q_scale > 0.0, _mass(others, q_most, heat) * q_scale, 0.0)
        mass -= (at == certain).to(tl.float64)
        mass = tl.maximum(mass, 0.0)
        upto = before + tl.cumsum(mass, 0)
        held = tl.maximum(held, tl.max(tl.where(mass > 0.0, at, 0), 0))
        found = tl.min(tl.where((upto > target) & (mass > 0.0), at, vocabulary), 0)
        before = tl.max(upto, 0)
        start += TILE
    return tl.where(found == vocabulary, held, found)


@triton.jit
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
    drawn,  # [requests * (G + 1)] i32
    counters,  # [2 * requests] i32 zeros
    vocabulary,
    span,
    requests,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    ALONE: tl.constexpr,
    RULE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Stages FIRST .. LAST; all of them in one launch, or each alone."""
    TOGETHER: tl.constexpr = (FIRST < LAST) and not ALONE
    MATCH: tl.constexpr = RULE == "match"
    REJECT: tl.constexpr = (RULE == "token") or (RULE == "block")
    part, parts = tl.program_id(0), tl.num_programs(0)
    r = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    real = row <= G
    line = r * (G + 1) + row
    first = part * span
    last = tl.minimum(first + span, vocabulary)
    target_rows = logits + r * (G + 1) * vocabulary
    cuda.gdc_launch_dependents()
    cuda.gdc_wait()
    count = tl.load(num_drafts + r)
    heat = tl.load(temperature + r)
    still = heat == 0.0
    heat = tl.where(still, 1.0, heat).to(tl.float64)
    seed, position = tl.load(seeds + r), tl.load(positions + r)
    slot = real & (row < G)
    draft = tl.load(drafts + r * G + row, mask=slot, other=0)
    drafted = slot & (row < count)

    if FIRST == 1:
        top, index, mass = _survey(
            target_rows, real, first, last, vocabulary, heat, ROWS, TILE, RULE != "greedy"
        )
        tl.store(largest + line * parts + part, top, mask=real)
        tl.store(ids + line * parts + part, index, mask=real)
        if RULE != "greedy":
            tl.store(masses + line * parts + part, mass, mask=real)
        if draft_logits is not None:
            proposed = draft_logits + r * G * vocabulary
            top, _, mass = _survey(proposed, slot, first, last, vocabulary, heat, ROWS, TILE, True)
            q_line = line + requests * (G + 1)
            tl.store(largest + q_line * parts + part, top, mask=slot)
            tl.store(masses + q_line * parts + part, mass, mask=slot)
        if ALONE:
            tl.debug_barrier()
        elif TOGETHER:
            is_last = arrive(counters + 2 * r) == parts - 1
            if RULE != "greedy":
                wait(counters + 2 * r, parts)

    if LAST >= 2:
        own, is_finite = _first_largest(largest, ids, line, parts, vocabulary, real, PARTS)
        own = own.to(tl.int64)
        most = tl.zeros((ROWS,), tl.float32)
        if RULE != "greedy":
            most, _, mass = _whole(largest, masses, line, parts, heat, real, PARTS)
            most = tl.where(is_finite, most, 0.0)
            total = tl.sum(mass, 1)

    if (FIRST <= 2) and (LAST >= 2) and MATCH:
        u = uniform(seed, position + 1 + row, (row * 0 + TARGET))
        for j in tl.static_range(G + 1):
            shares = tl.sum(tl.where((row == j)[:, None], mass, 0.0), 0)
            goal = _pick(u, row, j) * tl.max(tl.cumsum(shares, 0), 0)
            chosen, before = _passed(shares, goal, parts, PARTS)
            if chosen == part:
                picked = _search(
                    target_rows + j * vocabulary,
                    None,
                    _pick(most, row, j),
                    1.0,
                    0.0,
                    0.0,
                    vocabulary,
                    heat,
                    goal,
                    before,
                    first,
                    last,
                    vocabulary,
                    TILE,
                )
                tl.store(drawn + r * (G + 1) + j, picked)

    if (LAST >= 2) and REJECT:
        # Of the draft itself: p, q, and what its number has to stay below.
        value = tl.load(
            target_rows + row.to(tl.int64) * vocabulary + draft, mask=slot, other=float("-inf")
        )
        p = tl.where(still, (draft == own).to(tl.float64), _mass(value, most, heat) / total)
        p = tl.where(is_finite, p, 0.0)
        q = drafted.to(tl.float64)
        q_most = most * 0.0
        q_total = total * 0.0 + 1.0
        nowhere = row < 0
        q_finite = nowhere
        if draft_logits is not None:
            q_line = line + requests * (G + 1)
            q_most, q_finite, q_mass = _whole(largest, masses, q_line, parts, heat, slot, PARTS)
            q_most = tl.where(q_finite, q_most, 0.0)
            q_total = tl.sum(q_mass, 1)
            value = tl.load(
                draft_logits + (r * G + row) * vocabulary + draft,
                mask=slot,
                other=float("-inf"),
            )
            soft = tl.where(q_finite, _mass(value, q_most, heat) / q_total, 0.0)
            q = tl.where(drafted, tl.where(still, 1.0, soft), 0.0)
        ratio = tl.where(q > 0.0, p / tl.where(q > 0.0, q, 1.0), 0.0)
        u = uniform(seed, position + row * 0, row * 0 + ACCEPT + row)
        share = tl.full((ROWS,), 1.0, tl.float64)
        if RULE == "token":
            kept = u < tl.minimum(ratio, 1.0)
            number = tl.min(tl.where(kept | (row >= G), G, row), 0)
        else:
            block = 1.0
            block = block + tl.sum(ratio * 0.0, 0)
            for j in tl.static_range(G):
                block = tl.minimum(block * _pick(ratio, row, j), 1.0)
                share = tl.where(row == j + 1, block, share)
        # Of each row: what p has over q, p scaled by its share of the block. q is on the draft
        # alone where it is certain, and nowhere where nothing was drafted.
        soft_q = tl.where(still, nowhere, drafted & q_finite)
        if draft_logits is None:
            certain = tl.where(drafted, draft, vocabulary)
        else:
            certain = tl.where(tl.where(still, drafted, nowhere), draft, vocabulary)

    if (FIRST <= 2) and (LAST >= 2) and REJECT:
        wanted = (row == number) & slot if RULE == "token" else slot
        wanted = tl.where(still, nowhere, wanted & is_finite)
        sums = tl.zeros((ROWS,), tl.float64)
        scale = tl.where(is_finite, share / total, 0.0)
        for start in range(first, last, TILE):
            at = start + tl.arange(0, TILE)
            there = wanted[:, None] & (at < last)[None, :]
            offset = row.to(tl.int64)[:, None] * vocabulary + at[None, :]
            values = tl.load(target_rows + offset, mask=there, other=float("-inf"))
            rest = _mass(values, most[:, None], heat) * scale[:, None]
            if draft_logits is not None:
                others = tl.load(
                    draft_logits + r * G * vocabulary + offset,
                    mask=there & soft_q[:, None],
                    other=float("-inf"),
                )
                rest -= _mass(others, q_most[:, None], heat) / q_total[:, None]
            rest -= (at[None, :] == certain[:, None]).to(tl.float64)
            sums += tl.sum(tl.maximum(rest, 0.0), 1)
        tl.store(over + line * parts + part, sums, mask=real)

    if not TOGETHER:
        is_last = part == 0
        if ALONE:
            tl.debug_barrier()
    elif RULE != "greedy":
        is_last = arrive(counters + 2 * r + 1) == parts - 1

    if LAST == 3 and is_last:
        if REJECT:
            columns = tl.arange(0, PARTS)
            rests = tl.load(
                over + line[:, None] * parts + columns[None, :],
                mask=real[:, None] & (columns < parts)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            # Greedy rows are all on one token: what p has over q is on it, or nothing.
            rest = tl.where(still, share * (own != certain).to(tl.float64), tl.sum(rests, 1))
            rest = tl.where(is_finite, rest, 0.0)
            if RULE == "block":
                sure = share == 1.0
                inner = rest / tl.where(sure, 1.0, rest + 1.0 - share)
                inner = tl.where(sure, 1.0, inner)
                # The threshold of draft j is that of the block that ends with it.
                number = 0
                for j in tl.static_range(G):
                    threshold = _pick(share, row, G) if j == G - 1 else _pick(inner, row, j + 1)
                    number = tl.where(_pick(u, row, j) < threshold, j + 1, number)
            here = row == number
            whole = (number == G) | (tl.sum(tl.where(here, rest, 0.0), 0) <= NOTHING)
            shares = tl.where(whole, mass / total[:, None], rests)
            shares = tl.sum(tl.where(here[:, None], shares, 0.0), 0)
            plain = uniform(seed, position + 1, (number * 0 + TARGET))
            rejected = uniform(seed, position, (number * 0 + RESIDUAL))
            goal = tl.where(count == 0, plain, rejected) * tl.max(tl.cumsum(shares, 0), 0)
            chosen, before = _passed(shares, goal, parts, PARTS)
            q_row = None
            if draft_logits is not None:
                q_row = draft_logits + (r * G + tl.minimum(number, G - 1)) * vocabulary
            mixed = tl.where(whole, 0, _pick(soft_q.to(tl.int32), row, number)) > 0
            begin = chosen * span
            number_share = tl.where(whole, 1.0, _pick(share, row, number))
            drawn_token = _search(
                target_rows + number.to(tl.int64) * vocabulary,
                q_row,
                _pick(most, row, number),
                number_share / _pick(total, row, number),
                _pick(q_most, row, number),
                tl.where(mixed, 1.0 / _pick(q_total, row, number), 0.0),
                tl.where(whole, vocabulary, _pick(certain, row, number)),
                heat,
                goal,
                before,
                begin,
                tl.minimum(begin + span, vocabulary),
                vocabulary,
                TILE,
            )
            token = tl.where(still, _pick(own, row, number), drawn_token.to(tl.int64))
        else:
            if MATCH:
                draw = tl.load(drawn + line, mask=real, other=0, cache_modifier=".cg")
                own = tl.where(still, own, draw.to(tl.int64))
            same = (own == draft) & is_finite & drafted
            number = tl.min(tl.where(same, G, row), 0)
            token = _pick(own, row, number)
        number = number + 0 * tl.sum(row, 0)
        token = tl.where(_pick(is_finite.to(tl.int32), row, number) > 0, token, 0)
        tl.store(tokens + line, tl.where(row < number, draft, token), mask=real)
        tl.store(accepted + r, number.to(tl.int64))
        bad = tl.where(is_finite | (row > number), 0, 1)
        tl.store(finite + r, tl.max(bad, 0) == 0)
        if TOGETHER:
            tl.store(counters + 2 * r, 0)
            tl.store(counters + 2 * r + 1, 0)
