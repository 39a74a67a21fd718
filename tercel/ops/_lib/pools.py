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
    elif rows.element_size() == 1:  # what copies bytes does not know every dtype of one
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    pool.index_copy_(0, index, rows)


def draw_pool(
    make: InputMaker, count: int, slots: torch.Tensor, rows: torch.Tensor, dtype: str
) -> torch.Tensor:
    """`count` slots of poison but for `rows` at `slots`."""
    pool = make.poison(count, *rows.shape[1:], dtype=dtype)
    pool[slots] = rows
    return pool


def draw_pages(
    make: InputMaker, lengths: Sequence[int], pages: torch.Tensor, dtype: str = "act"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pages` [PAGES, PS, E] where rows of `lengths` tokens hold a value and all else is poison,
    and their block table [rows, longest], pages in random order, the sink behind a row's end."""
    counts = [-(-length // pages.shape[1]) for length in lengths]
    free = torch.split(make.choice(sum(counts), low=1, high=pages.shape[0]), counts)
    table = torch.nn.utils.rnn.pad_sequence(list(free), batch_first=True)
    pool = make.poison(*pages.shape, dtype=dtype)
    for row, length in enumerate(lengths):
        where = positions(table[row], pages.shape[1])[:length]
        pool.flatten(0, 1)[where] = pages.flatten(0, 1)[where]
    return pool, table


def positions(table: torch.Tensor, page_size: int) -> torch.Tensor:
    """[PG] page ids -> [PG * page_size] indices into pages that are laid end to end."""
    offsets = torch.arange(page_size, device=table.device)
    return (table.unsqueeze(-1) * page_size + offsets).flatten()


def check_slots(slots: torch.Tensor, count: int, name: str = "slots") -> None:
    """Raises ContractError unless indices are 0 .. count - 1 and only the sink occurs twice."""
    values = slots.tolist()
    live = [slot for slot in values if slot]
    if len(set(live)) != len(live):
        raise ContractError(f"{name}: {values} holds one index twice; give each its own")
    if not all(0 <= slot < count for slot in values):
        raise ContractError(f"{name}: {values} leaves the pool of {count}")


def check_cu_seqlens(cu_seqlens: Sequence[int]) -> None:
    """Raises ContractError unless the bounds start at 0 and do not fall."""
    if cu_seqlens[0] != 0 or list(cu_seqlens) != sorted(cu_seqlens):
        raise ContractError(f"cu_seqlens: {cu_seqlens} must start at 0 and not fall")
