"""Slots of many tokens sorted by expert, for products that take a block of one expert's rows at a
time, and the sums that bring their results back to tokens.

Nothing is read on the host: a program of a product reads its expert and place from a plan. Between
two products, rows lie in the order of the sorted slots, one expert after the other.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Tokens at a time, which bounds the scratch memory."""


class Slots(NamedTuple):
    """The slots of every expert of this rank, and how programs divide them."""

    lists: torch.Tensor
    """[E, T] i32, in order."""
    counts: torch.Tensor
    """[E] i32."""
    first_rows: torch.Tensor
    """[E] i32: the row of an expert's first slot where rows follow the sorted slots."""
    plan: torch.Tensor
    """[1 + 2 * blocks] i32: how many blocks there are, then each one's expert and first place."""
    blocks: int
    """As many as there can be."""


def sort(ids: torch.Tensor, first_expert: int, experts: int, rows: int) -> Slots:
    """Slots in blocks of up to `rows` of one expert."""
    tokens, chosen = ids.shape
    lists, counts, first_rows, plan = (
        torch.empty(shape, dtype=torch.int32, device=ids.device)
        for shape in ((experts, tokens), experts, experts, 1 + 2 * most_blocks(ids, experts, rows))
    )
    block = min(triton.next_power_of_2(tokens), 512)
    width = triton.next_power_of_2(chosen)
    _sort[(experts,)](
        ids, lists, counts, first_expert, tokens,
        CHOSEN=chosen, WIDTH=width, BLOCK=block, num_warps=8,
    )  # fmt: skip
    padded = triton.next_power_of_2(experts)
    _plan[(1,)](counts, first_rows, plan, EXPERTS=experts, PADDED=padded, ROWS=rows)
    return Slots(lists, counts, first_rows, plan, most_blocks(ids, experts, rows))


def in_chunks(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """`run` on a chunk of tokens after another."""
    if len(z) <= CHUNK:
        return run(z, ids, weights)
    starts = range(0, len(z), CHUNK)
    return torch.cat([run(*(t[at : at + CHUNK] for t in (z, ids, weights))) for at in starts])


def most_blocks(ids: torch.Tensor, experts: int, rows: int) -> int:
    """Every expert's last block may be short."""
    return triton.cdiv(ids.numel(), rows) + min(experts, ids.numel())


def combine(
    outputs: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first_expert: int,
    experts: int,
) -> torch.Tensor:
    """act(sum of weights * outputs [T * k, L] over a token's slots on this rank, in order)."""
    tokens, chosen = ids.shape
    latent = outputs.shape[1]
    y = torch.empty(tokens, latent, dtype=outputs.dtype, device=outputs.device)
    block = min(triton.next_power_of_2(latent), 1024)
    _combine[(tokens, triton.cdiv(latent, block))](
        outputs, ids, weights, y, first_expert, experts, latent, CHOSEN=chosen, BLOCK=block
    )
    return y


@triton.jit
def ends(lists, first_row, place, real, CHOSEN: tl.constexpr, UP: tl.constexpr):
    """(Row of x, row of the result) of an expert's slots at `place`, i64: FC1 takes tokens to
    sorted rows, FC2 those to slots."""
    slot = tl.load(lists + place, mask=real, other=0).to(tl.int64)
    row = first_row.to(tl.int64) + place
    if UP:
        return slot // CHOSEN, row
    return row, slot


@triton.jit
def element_of(column):
    """The element that stands in a column of a product, within its group of 32."""
    within = column % 32
    q = within % 8 // 2
    return column - within + 8 * q + within // 16 * 4 + within % 16 // 8 * 2 + within % 2


@triton.jit
def column_of(element):
    """The inverse of element_of."""
    within = element % 32
    column = within % 8 // 4 * 16 + within % 4 // 2 * 8 + within // 8 * 2 + within % 2
    return element - within + column


@triton.jit
def _sort(
    ids,  # [tokens, CHOSEN] i64
    lists,  # [E, tokens] i32
    counts,  # [E] i32
    first_expert,
    tokens,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert passes over all ids; a token names an expert at most once."""
    expert = tl.program_id(0)
    lists += expert.to(tl.int64) * tokens
    index = tl.arange(0, WIDTH)
    found = 0
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        slot = token[:, None] * CHOSEN + index[None, :]
        inside = (token < tokens)[:, None] & (index < CHOSEN)[None, :]
        ours = tl.load(ids + slot, mask=inside, other=-1) == first_expert + expert
        # One more than the slot, so that 0 says that there is none.
        own = tl.max(tl.where(ours, slot + 1, 0), 1)
        here = (own > 0).to(tl.int32)
        rank = found + tl.cumsum(here, 0) - 1
        tl.store(lists + rank, own - 1, mask=own > 0)
        found += tl.sum(here, 0)
    tl.store(counts + expert, found)


@triton.jit
def _plan(
    counts,
    first_rows,
    plan,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    expert = tl.arange(0, PADDED)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    tl.store(first_rows + expert, tl.cumsum(count, 0) - count, mask=expert < EXPERTS)
    blocks = (count + ROWS - 1) // ROWS
    first = tl.cumsum(blocks, 0) - blocks
    tl.store(plan, tl.sum(blocks, 0))
    for index in range(tl.max(blocks, 0)):
        entry = plan + 1 + 2 * (first + index)
        tl.store(entry, expert, mask=index < blocks)
        tl.store(entry + 1, expert * 0 + index * ROWS, mask=index < blocks)


@triton.jit
def _combine(
    outputs,  # [T * CHOSEN, latent] act
    ids,  # [T, CHOSEN] i64
    weights,  # [T, CHOSEN] f32
    y,  # [T, latent] act
    first_expert,
    experts,
    latent,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(CHOSEN):
        slot = token * CHOSEN + index
        expert = tl.load(ids + slot) - first_expert
        if (expert >= 0) & (expert < experts):
            values = tl.load(outputs + slot * latent + element, mask=element < latent, other=0.0)
            total += tl.load(weights + slot) * values.to(tl.float32)
    tl.store(y + token * latent + element, total.to(y.dtype.element_ty), mask=element < latent)
