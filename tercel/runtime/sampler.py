"""Draws the tokens of a step: gather the vocabulary, mask, penalize, sample or verify, report."""

from collections.abc import Callable, Iterable, Sequence

import torch

from tercel.core.group import Group, SingleGroup
from tercel.core.inputs import on_device
from tercel.core.sampling import RowResult, RowSampling, StepResult, Stream, TokenLogprobs
from tercel.core.step import Row, StepPlan
from tercel.ops.sampling.logprobs import logprobs
from tercel.ops.sampling.penalize import penalize
from tercel.ops.sampling.sample import sample
from tercel.ops.spec.accept import accept
from tercel.runtime.forced import ForcedAcceptance
from tercel.runtime.verdict import Drafted, Verdict


class Sampler:
    """Every rank draws the same tokens: logits, parameters and randomness are equal on all.

    What a row wants is read from the plan, so nothing but the results comes to the host, once.
    """

    def __init__(
        self,
        group: Group,
        illegal_ids: Iterable[int],
        device: torch.device,
        *,
        draw: Callable[..., tuple[torch.Tensor, torch.Tensor]] = sample.portable.run,
        rule: str = "match",
        forced: ForcedAcceptance | None = None,
    ) -> None:
        """`illegal_ids` are never drawn: padding, input-only slots, ids without a token; `draw` is
        an implementation of op sample; `rule` is that of op accept; `forced` replaces it in
        benchmarks."""
        self._group = group
        self._device = device
        self._rule = rule
        self._forced = forced
        # Bound once like the sites of a program: Limits and SamplingParams keep the contract, and
        # checking it again would take longer than a greedy draw.
        self._draw = draw
        self._accept: Callable[..., tuple[torch.Tensor, ...]] = accept.portable.run
        self._illegal = self._integers(sorted(illegal_ids))

    def run(
        self, shard: torch.Tensor, plan: StepPlan, draft_logits: torch.Tensor | None = None
    ) -> Verdict:
        """Draws, and verifies drafts; nothing is read on the host.

        Args:
            shard: [S, vocabulary of this rank] f32, a row per draw of the plan; may be written.
            draft_logits: [R * drafts, vocabulary of this rank] f32 that the drafts of the verify
                rows were drawn from; None: they are certain of themselves.
        """
        logits = self._group.all_gather(shard, dim=-1)
        logits.index_fill_(1, self._illegal, float("-inf"))
        draws = plan.draws
        samplings = [row.sampling_at(position) for row, position in draws]
        reported = [index for index, item in enumerate(samplings) if item.logprobs is not None]
        before = logits[self._integers(reported)]
        self._penalize(logits, samplings)
        self._forbid(logits, samplings)
        width = max(plan.tokens_per_verify_row, 1)
        plain = len(draws) if width == 1 else len(draws) - plan.num_verify_tokens
        tokens, finite = self._sample(
            logits[:plain], samplings[:plain], [position for _, position in draws[:plain]]
        )
        tokens = tokens.unsqueeze(1).expand(-1, width)
        accepted = torch.zeros_like(tokens[:, 0])
        if width > 1:
            verified = self._verify(logits[plain:], plan.verify, draft_logits)
            drawn = (tokens, accepted, finite)
            tokens, accepted, finite = (
                torch.cat(pair) for pair in zip(drawn, verified, strict=True)
            )
        return Verdict(tokens, accepted, finite, tuple(reported), before)

    def read(self, verdict: Verdict, plan: StepPlan, drafted: Drafted | None = None) -> StepResult:
        """The results on the host, one per request that samples; waits for the device."""
        columns = [verdict.tokens, torch.stack((verdict.accepted, verdict.finite.long()), 1)]
        if drafted is not None:
            columns.append(drafted.tokens)
        table = torch.cat(columns, 1).tolist()
        confidence = _chances(drafted)
        reports = self._reports(verdict, plan)
        width, results, draw = verdict.tokens.shape[1], [], 0
        for index, (row, num_draws) in enumerate(_sampling_rows(plan)):
            values = table[index]
            is_finite = bool(values[width + 1])
            tokens = tuple(values[: values[width] + is_finite])
            places = range(draw, draw + len(tokens))
            results.append(
                RowResult(
                    row.request_id,
                    tokens,
                    is_finite,
                    tuple(reports[place] for place in places if place in reports),
                    tuple(values[width + 2 :]) if is_finite else (),
                    confidence[index] if confidence else (),
                )
            )
            draw += num_draws
        return StepResult(tuple(results))

    def _verify(
        self, logits: torch.Tensor, rows: Sequence[Row], draft_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """(tokens, accepted, finite) of rows of several tokens each."""
        samplings = [row.sampling for row in rows]
        drafts = self._integers([row.tokens[1:] for row in rows])
        counts = self._integers([row.num_drafts for row in rows])
        if draft_logits is not None:
            draft_logits = self._group.all_gather(draft_logits, dim=-1)
        verified = self._accept(
            logits,
            drafts,
            draft_logits,
            counts,
            self._floats([item.temperature for item in samplings]),
            self._integers([item.top_k for item in samplings]),
            self._floats([item.top_p for item in samplings]),
            self._floats([item.min_p for item in samplings]),
            self._integers([item.seed for item in samplings]),
            self._integers([row.context_len for row in rows]),
            group=SingleGroup(),
            rule=self._rule,
            filtered=any(item.is_filtered for item in samplings),
            greedy=all(item.temperature == 0 for item in samplings),
        )
        if self._forced is not None:
            return self._forced.apply(verified, logits, drafts, counts, rows)
        return verified

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
            stream=int(Stream.TARGET),
            filtered=any(row.is_filtered for row in rows),
            greedy=all(row.temperature == 0 for row in rows),
        )

    def _reports(self, verdict: Verdict, plan: StepPlan) -> dict[int, TokenLogprobs]:
        """By draw, for the draws that ask for them; those after a rejected draft mean nothing."""
        if not verdict.reported:
            return {}
        draws = plan.draws
        wanted = [draws[index][0].sampling.logprobs or 0 for index in verdict.reported]
        firsts = len(draws) - plan.num_verify_tokens
        of_draws = torch.cat((verdict.tokens[:firsts, 0], verdict.tokens[firsts:].flatten()))
        tokens = of_draws[self._integers(verdict.reported)]
        columns = (tokens, *logprobs(verdict.logits, tokens, top=max(wanted)))
        return {
            index: _token_logprobs(count, *values)
            for index, count, *values in zip(
                verdict.reported, wanted, *(column.tolist() for column in columns), strict=True
            )
        }

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return on_device(values, torch.int64, self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return on_device(values, torch.float32, self._device)


def _sampling_rows(plan: StepPlan) -> list[tuple[Row, int]]:
    """With the draws of each."""
    prefill = [(row, 1) for row in plan.prefill if row.samples]
    return prefill + [(row, row.num_tokens) for row in plan.verify]


def _chances(drafted: Drafted | None) -> list[tuple[float, ...]]:
    if drafted is None or drafted.confidence is None:
        return []
    return [tuple(row) for row in drafted.confidence.sigmoid().tolist()]


def _token_logprobs(
    count: int, token: int, chosen: float, values: list[float], ids: list[int], rank: int
) -> TokenLogprobs:
    return TokenLogprobs(token, chosen, rank, tuple(zip(ids[:count], values[:count], strict=True)))
