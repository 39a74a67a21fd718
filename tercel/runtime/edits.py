"""Where the host has a hand in a step's logits: penalties, biases, grammars, reports."""

from collections.abc import Callable, Sequence

import torch

from tercel.core.inputs import on_device
from tercel.core.sampling import RowSampling
from tercel.core.step import StepPlan
from tercel.runtime.verdict import Reports


class Edits:
    """Of the draws of one step, as its requests ask for them."""

    def __init__(self, plan: StepPlan, device: torch.device, penalize: Callable[..., None]) -> None:
        """`penalize` is an implementation of the op of that name."""
        self._samplings = [row.sampling_at(position) for row, position in plan.draws]
        self._device = device
        self._penalize = penalize

    def apply(self, logits: torch.Tensor) -> Reports | None:
        """Changes logits [S, V] in place; what is reported is of those before."""
        asked = [i for i, item in enumerate(self._samplings) if item.logprobs is not None]
        reports = Reports(tuple(asked), logits[self._integers(asked)]) if asked else None
        self._change(logits, self._samplings)
        self._forbid(logits, self._samplings)
        return reports

    def _change(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
        """Penalties and biases."""
        history = [(index, *entry) for index, row in enumerate(rows) for entry in row.history]
        bias = [(index, *entry) for index, row in enumerate(rows) for entry in row.bias]
        if not history and not bias:
            return
        history_rows, tokens, counts = zip(*history, strict=True) if history else ((), (), ())
        bias_rows, bias_tokens, values = zip(*bias, strict=True) if bias else ((), (), ())
        self._penalize(
            logits,
            self._integers(history_rows),
            self._integers(tokens),
            self._floats(counts),
            self._floats([1.0] * len(history)),
            self._floats([row.repetition_penalty for row in rows]),
            self._floats([row.presence_penalty for row in rows]),
            self._floats([row.frequency_penalty for row in rows]),
            self._integers(bias_rows),
            self._integers(bias_tokens),
            self._floats(values),
        )

    def _forbid(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
        """Bars what a grammar does not allow."""
        masked = [(index, row.allowed) for index, row in enumerate(rows) if row.allowed is not None]
        if not masked:
            return
        index = self._integers([index for index, _ in masked])
        joined = bytearray(b"".join(mask for _, mask in masked))
        packed = torch.frombuffer(joined, dtype=torch.uint8)
        bits = packed.view(len(masked), -1, 1) >> torch.arange(8, dtype=torch.uint8) & 1
        allowed = bits.flatten(1)[:, : logits.shape[1]].bool().to(self._device)
        logits[index] = logits[index].masked_fill(~allowed, float("-inf"))

    def _integers(self, values: Sequence[int]) -> torch.Tensor:
        return on_device(values, torch.int64, self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return on_device(values, torch.float32, self._device)
