"""Inputs of decode steps at addresses that stay, which is what a captured graph reads."""

from dataclasses import dataclass

import torch

from tercel.core.inputs import StepInputs, VerifyInputs
from tercel.core.step import SINK, Row, StepClass, StepPlan

ALIGNMENT = 16
"""Elements; 128 bytes."""


@dataclass(frozen=True)
class StepSize:
    """What decode steps of one graph have in common."""

    rows: int
    width: int
    """Tokens per row: 1 + drafts."""
    pages: int
    """Columns of the block table."""

    @property
    def step_class(self) -> StepClass:
        return StepClass.DECODE if self.width == 1 else StepClass.VERIFY

    @property
    def tokens(self) -> int:
        return self.rows * self.width

    def idle(self) -> StepPlan:
        """A plan of this size that reads and writes nothing but the sinks."""
        row = Row("", (0,) * self.width, context_len=0, slot=SINK, pages=(SINK,))
        return StepPlan(verify=(row,) * self.rows)


class FixedInputs:
    """The integers of one step in one block of memory, which one copy brings to the device.

    Steps of every size use the same block: a step's inputs are read before the next is filled in.
    """

    def __init__(self, largest: StepSize, *, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        pinned = device.type == "cuda"
        size = _length(largest)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._sample_rows = torch.arange(largest.tokens, device=device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def of(self, size: StepSize) -> StepInputs:
        """What a program reads in steps of `size`: views that stay valid."""
        tokens, mapping, slots, lengths, pending, table = _parts(self._device, size)
        verify = VerifyInputs(size.width, slots, table, lengths, pending)
        rows = self._sample_rows[: size.tokens]
        return StepInputs(tokens, mapping, rows, num_prefill_tokens=0, prefill=None, verify=verify)

    def fill(self, plan: StepPlan, size: StepSize) -> None:
        """Copies `plan`, which has exactly `size.rows` verify rows, to the device, in the order of
        the stream and without waiting for it."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy out of this block; long done
        parts = [part.numpy() for part in _parts(self._host, size)]
        tokens, mapping, slots, lengths, held, table = parts
        table[:] = SINK
        tokens[:] = [token for row in plan.verify for token in row.tokens]
        mapping[:] = [
            row.pages[position // self._page_size] * self._page_size + position % self._page_size
            for row in plan.verify
            for position in range(row.context_len, row.seq_len)
        ]
        for index, row in enumerate(plan.verify):
            slots[index], lengths[index] = row.slot, row.context_len
            held[index] = row.pending
            table[index, : len(row.pages)] = row.pages
        used = _length(size)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _parts(block: torch.Tensor, size: StepSize) -> list[torch.Tensor]:
    """Views: tokens, slot mapping, slots, context lengths, pending, block table."""
    used = _used(size)
    parts = torch.split(block[: _length(size)], [_aligned(count) for count in used])
    *flat, table = (part[:count] for part, count in zip(parts, used, strict=True))
    return [*flat, table.view(size.rows, size.pages)]


def _used(size: StepSize) -> list[int]:
    return [size.tokens] * 2 + [size.rows] * 3 + [size.rows * size.pages]


def _aligned(count: int) -> int:
    """Each part starts at a multiple of ALIGNMENT, so that kernels are built for aligned pointers
    only."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _length(size: StepSize) -> int:
    return sum(map(_aligned, _used(size)))
