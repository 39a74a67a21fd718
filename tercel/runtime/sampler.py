"""Draws the next token of each row: gather the vocabulary, mask, penalize, sample, report."""

from collections.abc import Callable, Iterable, Sequence

import torch

from tercel.core.group import Group
from tercel.core.inputs import on_device
from tercel.core.sampling import RowResult, RowSampling, StepResult, TokenLogprobs
from tercel.core.step import Row
from tercel.ops.sampling.logprobs import logprobs
from tercel.ops.sampling.penalize import penalize
from tercel.ops.sampling.sample import sample

TARGET_STREAM = 0
"""Randomness of the model's own tokens; drafts and their acceptance have streams of their own."""

Draws = Sequence[tuple[Row, int]]


class Sampler:
    """Every rank draws the same tokens: logits, parameters and randomness are equal on all.

    What a row wants is read from the plan, so nothing but the drawn tokens comes to the host.
    """

    def __init__(
        self,
        group: Group,
        illegal_ids: Iterable[int],
        device: torch.device,
        draw: Callable[..., tuple[torch.Tensor, torch.Tensor]] = sample.portable.run,
    ) -> None:
        """`illegal_ids` are never drawn: padding, input-only slots, ids without a token. `draw` is
        an implementation of sampling/sample."""
        self._group = group
        self._device = device
        # Bound once like the sites of a program: Limits and SamplingParams keep the contract, and
        # checking it again would take longer than a greedy draw.
        self._draw = draw
        self._illegal = self._integers(sorted(illegal_ids))

    def run(self, shard: torch.Tensor, draws: Draws) -> StepResult:
        """One result per draw.

        Args:
            shard: [S, vocabulary of this rank] f32; may be written.
            draws: (row, position of the token) for each row of the shard; see StepPlan.draws.
        """
        logits = self._group.all_gather(shard, dim=-1)
        logits.index_fill_(1, self._illegal, float("-inf"))
        rows = [row.sampling for row, _ in draws]
        reported = [index for index, row in enumerate(rows) if row.logprobs is not None]
        before = logits[self._integers(reported)]
        self._penalize(logits, rows)
        tokens, finite = self._sample(logits, rows, [position for _, position in draws])
        drawn, is_finite = torch.stack([tokens, finite.to(tokens.dtype)]).tolist()
        logprobs = self._logprobs(before, tokens, rows, reported)
        return StepResult(
            tuple(
                RowResult(row.request_id, (token,), True, logprobs.get(index, ()))
                if ok
                else RowResult(row.request_id, (), False)
                for index, ((row, _), token, ok) in enumerate(
                    zip(draws, drawn, is_finite, strict=True)
                )
            )
        )

    def _penalize(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
        history = [(index, *entry) for index, row in enumerate(rows) for entry in row.history]
        bias = [(index, *entry) for index, row in enumerate(rows) for entry in row.bias]
        if not history and not bias:
            return
        history_rows, tokens, counts = zip(*history, strict=True) if history else ((), (), ())
        bias_rows, bias_tokens, values = zip(*bias, strict=True) if bias else ((), (), ())
        penalize(
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

    def _sample(
        self, logits: torch.Tensor, rows: Sequence[RowSampling], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._draw(
            logits,
            self._floats([row.temperature for row in rows]),
            self._integers([row.top_k for row in rows]),
            self._floats([row.top_p for row in rows]),
            self._floats([row.min_p for row in rows]),
            self._integers([row.seed for row in rows]),
            self._integers(positions),
            stream=TARGET_STREAM,
            filtered=any(row.is_filtered for row in rows),
            greedy=all(row.temperature == 0 for row in rows),
        )

    def _logprobs(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        rows: Sequence[RowSampling],
        reported: Sequence[int],
    ) -> dict[int, tuple[TokenLogprobs]]:
        """By index of the row, for the rows that ask for them."""
        if not reported:
            return {}
        wanted = [rows[index].logprobs or 0 for index in reported]
        tokens = tokens[self._integers(reported)]
        results = logprobs(logits, tokens, top=max(wanted))
        columns = (tokens, *results)
        return {
            index: (_token_logprobs(count, *values),)
            for index, count, *values in zip(
                reported, wanted, *(column.tolist() for column in columns), strict=True
            )
        }

    def _integers(self, values: Sequence[int]) -> torch.Tensor:
        return on_device(values, torch.int64, self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return on_device(values, torch.float32, self._device)


def _token_logprobs(
    count: int, token: int, chosen: float, values: list[float], ids: list[int], rank: int
) -> TokenLogprobs:
    return TokenLogprobs(token, chosen, rank, tuple(zip(ids[:count], values[:count], strict=True)))
