"""Rejecting rules: what the decider of a request knows first, what p has over q, and the end.

`drafts` points to those of the request at hand.
"""

import triton
import triton.language as tl

from tercel.core.sampling import Stream
from tercel.ops._lib.kernel_exp import masses as mass_of
from tercel.ops._lib.kernel_philox import uniform
from tercel.ops.spec.accept import rules
from tercel.ops.spec.accept.stages.kernel_greedy import store_result
from tercel.ops.spec.accept.stages.kernel_parts import passed, search, whole

FACTS = tl.constexpr(8)
"""fp64 numbers per row that the second stage leaves for the others."""
TARGET = tl.constexpr(int(Stream.TARGET))
ACCEPT = tl.constexpr(int(Stream.ACCEPT))
RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))
NOTHING = tl.constexpr(rules.NOTHING)


@triton.jit
def pick(values, row, j):
    """values[j] of a vector."""
    return tl.sum(tl.where(row == j, values, tl.zeros_like(values)), 0)


@triton.jit
def plan(
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
    draft = tl.load(drafts + row, mask=slot, other=0)
    drafted = slot & (row < tl.load(num_drafts + r))
    most, is_finite, mass = whole(largest, masses, line, parts, heat, real, PARTS)
    total = tl.where(is_finite, tl.sum(mass, 1), 1.0)
    value = tl.load(logits + line * vocabulary + draft, mask=slot, other=float("-inf"))
    p = tl.where(is_finite, mass_of(value, most, heat) / total, 0.0)
    q = drafted.to(tl.float64)
    q_most, q_scale = most * 0.0, q * 0.0
    if draft_logits is not None:
        q_line = line + requests * (G + 1)
        q_most, q_finite, q_mass = whole(largest, masses, q_line, parts, heat, slot, PARTS)
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
            block = tl.minimum(block * pick(ratio, row, j), 1.0)
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
def over_part(
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
        rest -= (at == tl.load(drafts + j)).to(tl.float64)
    else:
        others = draft_logits + (r * G + j) * vocabulary + at
        others = tl.load(others, mask=there, other=float("-inf"))
        most = tl.load(fact + 2 * ROWS, cache_modifier=".cg").to(tl.float32)
        rest -= mass_of(others, most, heat) * tl.load(fact + 3 * ROWS, cache_modifier=".cg")
    tl.store(over + line * parts + part, tl.sum(tl.maximum(rest, 0.0), 0))


@triton.jit
def decide(
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
    is_whole = (pick(wanted.to(tl.int32), row, number) == 0) | (pick(rest, row, number) <= NOTHING)

    # From here on one row, at the first place of vectors.
    one = tl.arange(0, 1)
    own_line = r * (G + 1) + number + one
    some = one == 0
    most, _, mass = whole(largest, masses, own_line, parts, heat, some, PARTS)
    left = tl.sum(tl.where((row == number)[:, None], rests, 0.0), 0)[None, :]
    mass = tl.where(is_whole, mass, left)
    plain = uniform(seed, position + 1, number * 0 + TARGET)
    rejected = uniform(seed, position, number * 0 + RESIDUAL)
    u = tl.where(tl.load(num_drafts + r) == 0, plain, rejected)
    chosen, goal, before = passed(mass, u, parts, PARTS)
    fact = facts + r * (FACTS * ROWS) + number + one
    scale = tl.where(is_whole, 1.0, tl.load(fact + ROWS, cache_modifier=".cg"))
    q_most = tl.load(fact + 2 * ROWS, cache_modifier=".cg").to(tl.float32)
    q_scale = tl.where(is_whole, 0.0, tl.load(fact + 3 * ROWS, cache_modifier=".cg"))
    place = tl.minimum(number, G - 1)
    certain = tl.full((1,), 0, tl.int64) + vocabulary
    q_source = None
    if draft_logits is None:
        certain = tl.where(is_whole, certain, tl.load(drafts + place))
    else:
        q_source = draft_logits + (r * G + place) * vocabulary
    token = search(
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
    draft = tl.load(drafts + row, mask=row < G, other=0)
    store_result(tokens, accepted, finite, r, number, own, is_finite, draft, G, ROWS)
