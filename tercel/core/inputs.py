"""The device side of a step: fixed-address tensors that one plan is copied into."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tercel.core.sampling import Draws
from tercel.core.step import Row, StepPlan

Put = Callable[[list[int]], torch.Tensor]


@dataclass(frozen=True)
class PrefillInputs:
    """Rows whose tokens run through the chunked forms. Lengths are host integers of the plan."""

    cu_seqlens: tuple[int, ...]
    """Row r's tokens are cu_seqlens[r] .. cu_seqlens[r + 1] of the step."""
    context_lens: tuple[int, ...]
    """Cached tokens before the step, per row."""
    slots: torch.Tensor
    """[P] int64 KDA slots."""
    block_table: torch.Tensor
    """[P, pages] int64, zero (the sink) past a row's end."""


@dataclass(frozen=True)
class VerifyInputs:
    """Decode and verify rows, `width` tokens each, after the prefill tokens."""

    width: int
    """Tokens per row: 1 + drafts."""
    slots: torch.Tensor
    """[R] int64 KDA slots; padded rows carry the sink."""
    block_table: torch.Tensor
    """[R, pages] int64."""
    context_lens: torch.Tensor
    """[R] int64 cached tokens before the step."""
    pending: torch.Tensor
    """[R] int64 accepted drafts of the previous step that the KDA state does not hold yet."""
    num_drafts: torch.Tensor
    """[R] int64 tokens after the first that are drafts; padding follows them."""


@dataclass(frozen=True)
class DrawInputs:
    """The requests that sample: the prefill rows that do, then the verify rows."""

    kind: Draws
    anchors: torch.Tensor
    """[D] int64 positions of the tokens that the first draws follow: a prefill row's last token, a
    verify row's first."""
    slots: torch.Tensor
    """[D] int64."""
    block_table: torch.Tensor
    """[D, pages] int64."""
    seeds: torch.Tensor
    """[D] int64."""
    top_k: torch.Tensor
    """[D] int64."""
    temperature: torch.Tensor
    """[D] fp32."""
    top_p: torch.Tensor
    """[D] fp32."""
    min_p: torch.Tensor
    """[D] fp32."""


@dataclass(frozen=True)
class StepInputs:
    """What a program, a drafter and a sampler read."""

    tokens: torch.Tensor
    """[T] int64, prefill tokens first."""
    positions: torch.Tensor
    """[T] int64."""
    slot_mapping: torch.Tensor
    """[T] int64 where each token's latent is written: page * page_size + offset."""
    sample_rows: torch.Tensor
    """[S] int64 rows of [T] whose logits are wanted."""
    num_prefill_tokens: int
    prefill: PrefillInputs | None
    verify: VerifyInputs | None
    draws: DrawInputs | None
    """None: no row samples."""

    @property
    def drafts(self) -> torch.Tensor:
        """[R, width - 1] int64 of the verify rows."""
        assert self.verify is not None
        return self.tokens[self.num_prefill_tokens :].view(-1, self.verify.width)[:, 1:]


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host values as a tensor; on a GPU through pinned memory, which nobody waits for."""
    is_gpu = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_gpu).to(device, non_blocking=True)


def build_inputs(plan: StepPlan, *, page_size: int, device: torch.device) -> StepInputs:
    """Copies `plan` to `device`."""

    def put(values: list[int]) -> torch.Tensor:
        return on_device(values, torch.int64, device)

    verify = _verify(plan, put, device) if plan.verify else None
    return StepInputs(
        tokens=put([token for row in plan.rows for token in row.tokens]),
        positions=put(positions_of(plan.rows)),
        slot_mapping=put(slot_mapping_of(plan.rows, page_size)),
        sample_rows=put(_sample_rows(plan)),
        num_prefill_tokens=plan.num_prefill_tokens,
        prefill=_prefill(plan, put, device) if plan.prefill else None,
        verify=verify,
        draws=_draws(plan, put, device) if plan.sampled else None,
    )


def positions_of(rows: Sequence[Row]) -> list[int]:
    """Of every token."""
    return [position for row in rows for position in range(row.context_len, row.seq_len)]


def slot_mapping_of(rows: Sequence[Row], page_size: int) -> list[int]:
    """Where what is kept of every token goes."""
    return [
        row.pages[position // page_size] * page_size + position % page_size
        for row in rows
        for position in range(row.context_len, row.seq_len)
    ]


def _sample_rows(plan: StepPlan) -> list[int]:
    """The last token of every sampling prefill row, then every token of the verify rows."""
    rows, start = [], 0
    for row in plan.prefill:
        start += row.num_tokens
        if row.samples:
            rows.append(start - 1)
    return rows + list(range(start, start + plan.num_verify_tokens))


def _block_table(rows: tuple[Row, ...], device: torch.device) -> torch.Tensor:
    width = max(len(row.pages) for row in rows)
    table = [list(row.pages) + [0] * (width - len(row.pages)) for row in rows]
    return on_device(table, torch.int64, device)


def _prefill(plan: StepPlan, put: Put, device: torch.device) -> PrefillInputs:
    bounds = [0]
    for row in plan.prefill:
        bounds.append(bounds[-1] + row.num_tokens)
    return PrefillInputs(
        cu_seqlens=tuple(bounds),
        context_lens=tuple(row.context_len for row in plan.prefill),
        slots=put([row.slot for row in plan.prefill]),
        block_table=_block_table(plan.prefill, device),
    )


def _verify(plan: StepPlan, put: Put, device: torch.device) -> VerifyInputs:
    return VerifyInputs(
        width=plan.tokens_per_verify_row,
        slots=put([row.slot for row in plan.verify]),
        block_table=_block_table(plan.verify, device),
        context_lens=put([row.context_len for row in plan.verify]),
        pending=put([row.pending for row in plan.verify]),
        num_drafts=put([row.num_drafts for row in plan.verify]),
    )


def _draws(plan: StepPlan, put: Put, device: torch.device) -> DrawInputs:
    samplings = [row.sampling for row in plan.sampled]
    firsts = [row.seq_len - 1 for row in plan.prefill if row.samples]

    def floats(values: list[float]) -> torch.Tensor:
        return on_device(values, torch.float32, device)

    return DrawInputs(
        kind=plan.kind,
        anchors=put(firsts + [row.context_len for row in plan.verify]),
        slots=put([row.slot for row in plan.sampled]),
        block_table=_block_table(plan.sampled, device),
        seeds=put([item.seed for item in samplings]),
        top_k=put([item.top_k for item in samplings]),
        temperature=floats([item.temperature for item in samplings]),
        top_p=floats([item.top_p for item in samplings]),
        min_p=floats([item.min_p for item in samplings]),
    )
