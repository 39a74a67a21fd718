"""Pools that rows of a step share: how contracts draw them, check their indices, write them."""

from collections.abc import Sequence

import torch

from tercel.contract.contract import InputMaker
from tercel.errors import ContractError

WIDE = torch.complex128
"""Sixteen bytes: plain torch copies indexed rows element by element, so wide elements are fast."""


def store_rows(pool: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """pool[index] = rows along the first axis, bit for bit; indices occur once, the sink aside."""
    if rows.shape[-1] * rows.element_size() % WIDE.itemsize == 0:
        pool, rows = pool.view(WIDE), rows.view(WIDE)
    pool.index_copy_(0, index, rows)


def draw_pool(
    make: InputMaker, count: int, slots: torch.Tensor, rows: torch.Tensor, dtype: str
) -> torch.Tensor:
    """`count` slots of poison but for `rows` at `slots`."""
    pool = make.poison(count, *rows.shape[1:], dtype=dtype)
    pool[slots] = rows
    return pool


def draw_block_table(
    make: InputMaker, tokens: Sequence[int], page_size: int, pages: int
) -> torch.Tensor:
    """[rows, longest] pages that hold `tokens[r]` each, scattered over the pool, sink elsewhere."""
    counts = [-(-length // page_size) for length in tokens]
    free = iter(make.choice(sum(counts), low=1, high=pages).tolist())
    longest = max(counts)
    rows = [[next(free) for _ in range(n)] + [0] * (longest - n) for n in counts]
    return torch.tensor(rows, dtype=torch.int64)


def check_slots(slots: torch.Tensor, count: int) -> None:
    """Raises ContractError unless slots are 0 .. count - 1 and only the sink occurs twice."""
    values = slots.tolist()
    live = [slot for slot in values if slot]
    if len(set(live)) != len(live):
        raise ContractError(f"slots: {values} names one slot for two rows; give each row its own")
    if not all(0 <= slot < count for slot in values):
        raise ContractError(f"slots: {values} leaves the pool of {count}")


def check_cu_seqlens(cu_seqlens: Sequence[int]) -> None:
    """Raises ContractError unless the bounds start at 0 and do not fall."""
    if cu_seqlens[0] != 0 or list(cu_seqlens) != sorted(cu_seqlens):
        raise ContractError(f"cu_seqlens: {cu_seqlens} must start at 0 and not fall")
