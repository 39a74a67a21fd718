"""What programs that each have a part of the vocabulary know of rows of logits, and draws by it."""

import triton
import triton.language as tl

from tercel.ops._lib.kernel_exp import masses as mass_of


@triton.jit
def survey(
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
def whole(largest, masses, line, parts, heat, real, PARTS: tl.constexpr):
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
def greedy(largest, ids, line, parts, vocabulary, real, PARTS: tl.constexpr):
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
def passed(mass, target, parts, PARTS: tl.constexpr):
    """Of rows of masses [ROWS, PARTS]: (the part in which the cumulative mass passes the row's
    target, a share of all; that target; the mass before the part)."""
    part = tl.arange(0, PARTS)
    upto = tl.cumsum(mass, 1)
    goal = target * tl.max(upto, 1)
    chosen = tl.minimum(tl.sum((upto <= goal[:, None]).to(tl.int32), 1), parts - 1)
    before = tl.max(tl.where(part[None, :] < chosen[:, None], upto, 0.0), 1)
    return chosen, goal, before


@triton.jit
def search(
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
