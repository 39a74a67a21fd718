"""One rank's drafter at work: context of every token that the target runs, then guesses."""

import torch

from tercel.core.cache import DrafterCache
from tercel.core.drafter import TapStream
from tercel.core.drafting import Block, DraftSampling, Taps
from tercel.core.inputs import StepInputs, on_device
from tercel.core.step import Row, StepPlan
from tercel.runtime.verdict import Drafted, Verdict
from tercel.targets.drafters import Drafter


class TapBuffer:
    """Where the target leaves what a drafter reads, at addresses that stay. The rows of one token
    stand together, so that they are its features without a copy."""

    def __init__(
        self, layers: tuple[int, ...], stream: TapStream, max_tokens: int, like: torch.Tensor
    ) -> None:
        """`like` [.., N] is a row of activations."""
        self._layers, self._stream = layers, stream
        self._rows = like.new_zeros(max_tokens, len(layers), like.shape[-1])

    def of(self, num_tokens: int) -> Taps:
        """Of a step of so many tokens."""
        return Taps(self._layers, self._rows[:num_tokens].transpose(0, 1), self._stream)


class DraftRunner:
    """Owns the drafter's context pages and, per slot, what the latest guesses were drawn from."""

    def __init__(
        self,
        taps: TapBuffer,
        drafter: Drafter | None,
        cache: DrafterCache,
        *,
        logits: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            drafter: None on the pipeline stages that only capture taps.
            logits: [slots, drafts, vocabulary of this rank] f32, for acceptance rules that read
                what guesses were drawn from.
        """
        self.taps = taps
        self._drafter = drafter
        self._cache = cache
        self._device = device
        self._logits = logits

    def clear(self, pages: torch.Tensor) -> None:
        """Zeroes pages that a request has just been given."""
        self._cache.pages.index_fill_(1, pages, 0)

    def write_context(self, taps: Taps, plan: StepPlan, inputs: StepInputs) -> None:
        """Of every token of the step, rejected drafts too: they lie past the request's end, and
        are written again before its end gets there."""
        if self._drafter is None:
            return
        features = taps.rows.transpose(0, 1).flatten(1)
        positions = self._integers(
            [p for row in plan.rows for p in range(row.context_len, row.seq_len)]
        )
        self._drafter.write_context(features, positions, inputs.slot_mapping, self._cache)

    def proposed(self, plan: StepPlan, inputs: StepInputs) -> torch.Tensor | None:
        """[R * drafts, V] what the drafts of the plan's verify rows were drawn from."""
        if self._logits is None or inputs.verify is None or inputs.verify.width == 1:
            return None
        return self._logits[inputs.verify.slots, : inputs.verify.width - 1].flatten(0, 1)

    def draft(self, plan: StepPlan, inputs: StepInputs, verdict: Verdict) -> Drafted | None:
        """Guesses for every request that samples; their anchors are the verdict's last tokens."""
        if self._drafter is None or not plan.num_drafts:
            return None
        slots, table, lengths = self._requests(plan, inputs, verdict)
        samplings = [row.sampling for row in (*_sampled(plan), *plan.verify)]
        temperatures = [item.temperature for item in samplings]
        sampling = DraftSampling(
            on_device(temperatures, torch.float32, self._device),
            self._integers([item.seed for item in samplings]),
            greedy=all(temperature == 0 for temperature in temperatures),
        )
        block = Block(verdict.tokens[:, -1], lengths, table, plan.num_drafts)
        tokens, logits, confidence = self._drafter.draft(block, sampling, self._cache)
        if self._logits is not None:
            held = logits.view(len(samplings), plan.num_drafts, -1)
            self._logits[slots, : plan.num_drafts] = held
        return Drafted(tokens, confidence)

    def _requests(
        self, plan: StepPlan, inputs: StepInputs, verdict: Verdict
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(slots, block table, context lengths) of the requests that sample, after the step."""
        slots, tables, lengths = [], [], []
        sampled = [index for index, row in enumerate(plan.prefill) if row.samples]
        if sampled and inputs.prefill is not None:
            index = self._integers(sampled)
            slots.append(inputs.prefill.slots[index])
            tables.append(inputs.prefill.block_table[index])
            lengths.append(self._integers([row.seq_len for row in _sampled(plan)]))
        if plan.verify and inputs.verify is not None:
            slots.append(inputs.verify.slots)
            tables.append(inputs.verify.block_table)
            lengths.append(inputs.verify.context_lens + verdict.accepted[len(sampled) :] + 1)
        width = max(table.shape[1] for table in tables)
        padded = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in tables]
        return torch.cat(slots), torch.cat(padded), torch.cat(lengths)

    def _integers(self, values: list[int]) -> torch.Tensor:
        return on_device(values, torch.int64, self._device)


def _sampled(plan: StepPlan) -> list[Row]:
    return [row for row in plan.prefill if row.samples]
