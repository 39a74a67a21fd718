"""How a call is cut: slabs of tokens that bound the workspace, chunks of a slab, and segments of
its long sequences."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from tercel.ops._lib.delta_rule import power_of_two


class Config(NamedTuple):
    """How a call is cut into programs."""

    chunk: int
    """Tokens of a chunk: 16, 32 or 64."""
    depth: int
    """Key or value channels that are prepared at a time."""
    prepare_warps: int
    registers: int | None
    """Most registers of a thread of `prepare`; None: as many as the compiler likes."""
    rows: int
    """Value channels that a program carries."""
    carry_warps: int
    stages: int
    """Chunks in flight."""
    segment_heads: int
    """Most heads with which a sequence is cut into segments."""
    segment_chunks: int
    """Fewest chunks of a sequence that is cut."""
    compose_rows: int
    """Value channels that a program composes."""
    compose_warps: int
    compose_stages: int
    slab: int
    """Tokens times heads that are prepared at a time."""


WIDE = Config(
    chunk=16,
    depth=64,
    prepare_warps=1,
    registers=None,
    rows=64,
    carry_warps=4,
    stages=3,
    segment_heads=16,
    segment_chunks=128,
    compose_rows=32,
    compose_warps=8,
    compose_stages=3,
    slab=96 * 8192,
)
EXACT = WIDE._replace(prepare_warps=2, rows=32, stages=1, segment_heads=0)
"""In fp32 products run on CUDA cores, where small tiles lose least."""


class Piece(NamedTuple):
    """Tokens of one sequence."""

    row: int
    begin: int
    end: int
    fresh: bool


class Plan(NamedTuple):
    """Where the chunks and segments of a slab lie."""

    chunks: int
    segments: int
    surveyed: bool
    """Whether a sequence has more segments than one."""
    table: tuple[int, ...]
    """N + 1 bounds of the sequences in tokens, in chunks and in segments; N lengths of a segment in
    chunks; N flags of fresh sequences."""


def slabs(
    cu_seqlens: Sequence[int], fresh: Sequence[bool], most: int
) -> Iterator[tuple[Piece, ...]]:
    """Pieces of consecutive sequences, at most `most` tokens in all. Where a sequence is cut does
    not depend on its neighbours; a later piece goes on from what the slot then holds."""
    slab: list[Piece] = []
    for row, (start, stop) in enumerate(pairwise(cu_seqlens)):
        for begin in range(start, max(stop, start + 1), most):
            piece = Piece(row, begin, min(begin + most, stop), fresh[row] and begin == start)
            if slab and piece.end - slab[0].begin > most:
                yield tuple(slab)
                slab = []
            slab.append(piece)
    if slab:
        yield tuple(slab)


def plan(slab: Sequence[Piece], heads: int, config: Config) -> Plan:
    chunks = [-(-(piece.end - piece.begin) // config.chunk) for piece in slab]
    lengths = [_segment_length(count, heads, config) for count in chunks]
    segments = [max(1, -(-n // length)) for n, length in zip(chunks, lengths, strict=True)]
    begin = slab[0].begin
    bounds = (*(piece.begin - begin for piece in slab), slab[-1].end - begin)
    firsts = (0, *accumulate(chunks)), (0, *accumulate(segments))
    flags = (int(piece.fresh) for piece in slab)
    table = (*bounds, *firsts[0], *firsts[1], *lengths, *flags)
    return Plan(firsts[0][-1], firsts[1][-1], max(segments) > 1, table)


def _segment_length(chunks: int, heads: int, config: Config) -> int:
    """Few heads leave most of a GPU to further segments; to compose one takes a step as well."""
    if heads > config.segment_heads or chunks < config.segment_chunks:
        return max(chunks, 1)
    return power_of_two(math.isqrt(chunks - 1) + 1)
