"""Inputs of decode steps at addresses that stay, which is what a captured graph reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tercel.core.inputs import (
    DrawInputs,
    StepInputs,
    VerifyInputs,
    positions_of,
    slot_mapping_of,
)
from tercel.core.sampling import Draws
from tercel.core.step import SINK, StepClass, StepPlan

ALIGNMENT = 16
"""Elements; 128 bytes."""
TOKEN_PARTS = ("tokens", "positions", "slot_mapping")
ROW_FIELDS = {
    "slots": "slot",
    "context_lens": "context_len",
    "pending": "pending",
    "num_drafts": "num_drafts",
}
"""Part of the block to the field of a row."""
DRAW_FIELDS = {
    "seeds": "seed",
    "top_k": "top_k",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
}
"""Part of the block to the field of a row's sampling."""
FLOATS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True)
class StepSize:
    """What decode steps of one graph have in common."""

    rows: int
    width: int
    """Tokens per row: 1 + drafts."""
    pages: int
    """Columns of the block table."""
    num_drafts: int = 0
    """Guesses made of each row, for its next step."""
    draws: Draws | None = Draws.GREEDY
    """None: the host has a hand in the logits, with which the graph ends."""

    @property
    def step_class(self) -> StepClass:
        return StepClass.DECODE if self.width == 1 else StepClass.VERIFY

    @property
    def tokens(self) -> int:
        return self.rows * self.width


def smallest(sizes: Sequence[StepSize], plan: StepPlan, page_size: int) -> StepSize | None:
    """The first of `sizes`, which are in order, that a plan of verify rows can be brought to."""
    rows, width = len(plan.verify), plan.tokens_per_verify_row
    longest = max(row.context_len for row in plan.verify)
    draws = None if plan.is_edited else plan.kind
    fitting = (
        size
        for size in sizes
        if size.rows >= rows
        and size.width >= width
        and size.draws is draws
        and size.num_drafts == plan.num_drafts
        and size.pages * page_size >= longest + size.width
    )
    return next(fitting, None)


class FixedInputs:
    """The numbers of one step in one block of memory, which one copy brings to the device.

    Steps of every size use the same block: a step's inputs are read before the next is filled in.
    """

    def __init__(self, sizes: Sequence[StepSize], *, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        pinned = device.type == "cuda"
        length = max(map(_length, sizes))
        self._host = torch.zeros(length, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(length, dtype=torch.int64, device=device)
        # Views are made once: making them would take longer than filling them.
        self._views = {
            size: {name: part.numpy() for name, part in _parts(self._host, size).items()}
            for size in sizes
        }
        self._sample_rows = torch.arange(max(size.tokens for size in sizes), device=device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def of(self, size: StepSize, kind: Draws) -> StepInputs:
        """What steps of `size` read, whose tokens are drawn as `kind` says: views that stay
        valid."""
        part = _parts(self._device, size)
        table, slots, lengths = part["table"], part["slots"], part["context_lens"]
        drawn = {name: part[name] for name in DRAW_FIELDS}
        return StepInputs(
            tokens=part["tokens"],
            positions=part["positions"],
            slot_mapping=part["slot_mapping"],
            sample_rows=self._sample_rows[: size.tokens],
            num_prefill_tokens=0,
            prefill=None,
            verify=VerifyInputs(
                size.width, slots, table, lengths, part["pending"], part["num_drafts"]
            ),
            draws=DrawInputs(kind, anchors=lengths, slots=slots, block_table=table, **drawn),
        )

    def fill(self, plan: StepPlan, size: StepSize) -> None:
        """Copies `plan`, padded to `size`, to the device, in the order of the stream and without
        waiting for it."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy out of this block; long done
        part, rows = self._views[size], plan.verify
        part["tokens"][:] = [token for row in rows for token in row.tokens]
        part["positions"][:] = positions_of(rows)
        part["slot_mapping"][:] = slot_mapping_of(rows, self._page_size)
        for name, field in ROW_FIELDS.items():
            part[name][:] = [getattr(row, field) for row in rows]
        for name, field in DRAW_FIELDS.items():
            part[name][:] = [getattr(row.sampling, field) for row in rows]
        part["table"][:] = SINK
        for index, row in enumerate(rows):
            part["table"][index, : len(row.pages)] = row.pages
        used = _length(size)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _parts(block: torch.Tensor, size: StepSize) -> dict[str, torch.Tensor]:
    """Views by name; floats [rows] fp32, the table [rows, pages]."""
    counts = _counts(size)
    pieces = torch.split(block[: _length(size)], [_aligned(count) for count in counts.values()])
    parts = {
        name: piece[:count] for (name, count), piece in zip(counts.items(), pieces, strict=True)
    }
    for name in FLOATS:
        parts[name] = parts[name].view(torch.float32)[: size.rows]
    parts["table"] = parts["table"].view(size.rows, size.pages)
    return parts


def _counts(size: StepSize) -> dict[str, int]:
    """Elements of 8 bytes of each part."""
    return {
        **dict.fromkeys(TOKEN_PARTS, size.tokens),
        **dict.fromkeys((*ROW_FIELDS, *DRAW_FIELDS), size.rows),
        **dict.fromkeys(FLOATS, -(-size.rows // 2)),
        "table": size.rows * size.pages,
    }


def _aligned(count: int) -> int:
    """Each part starts at a multiple of ALIGNMENT, so that kernels are built for aligned pointers
    only."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _length(size: StepSize) -> int:
    return sum(map(_aligned, _counts(size).values()))
