"""What a step gave, while it is still on the device, and how it comes to the host."""

from dataclasses import dataclass

import torch

from tercel.core.sampling import RowResult, StepResult, TokenLogprobs
from tercel.core.step import StepPlan


@dataclass(frozen=True)
class Reports:
    """Draws whose log-probabilities are asked for."""

    draws: tuple[int, ...]
    """Rows of the step's logits."""
    logits: torch.Tensor
    """[len(draws), V] before penalties."""


@dataclass(frozen=True)
class Verdict:
    """One entry per request that samples: the prefill rows that do, then the verify rows."""

    tokens: torch.Tensor
    """[D, W] i64: the drafts that are kept, then the token after them in every place left, so that
    the last column is what the request goes on from."""
    accepted: torch.Tensor
    """[D] i64 drafts that are kept."""
    finite: torch.Tensor
    """[D] bool: False where no token could be drawn."""
    reports: Reports | None = None


@dataclass(frozen=True)
class Drafted:
    """Guesses for the next step, one row per entry of the verdict."""

    tokens: torch.Tensor
    """[D, g] i64."""
    confidence: torch.Tensor | None
    """[D, g] logits of the chance that each is accepted if those before it are."""


@dataclass(frozen=True)
class Outcome:
    """Verdict and guesses in one table, which comes to the host in one copy."""

    table: torch.Tensor
    """[D, W + 2 + g or 2g] i64: tokens, accepted, finite, guesses, bits of the chances in fp64."""
    width: int
    num_drafts: int
    reports: Reports | None = None

    @classmethod
    def of(cls, verdict: Verdict, drafted: Drafted | None) -> "Outcome":
        columns = [verdict.tokens, torch.stack((verdict.accepted, verdict.finite.long()), 1)]
        if drafted is not None:
            columns.append(drafted.tokens)
            if drafted.confidence is not None:
                columns.append(drafted.confidence.sigmoid().double().view(torch.int64))
        num_drafts = 0 if drafted is None else drafted.tokens.shape[1]
        table = torch.cat(columns, 1)
        return cls(table, verdict.tokens.shape[1], num_drafts, verdict.reports)

    def read(self, plan: StepPlan, reports: dict[int, TokenLogprobs]) -> StepResult:
        """The results of the requests of `plan` that sample, which are the first of the table;
        waits for the device. `reports` are by draw."""
        table = self.table.cpu()
        chances = table[:, self.width + 2 + self.num_drafts :].contiguous().view(torch.float64)
        firsts = len(plan.sampled) - len(plan.verify)
        results, draw = [], 0
        for index, row in enumerate(plan.sampled):
            values = table[index].tolist()
            accepted, finite = values[self.width : self.width + 2]
            tokens = tuple(values[: accepted + finite])
            guesses = values[self.width + 2 : self.width + 2 + self.num_drafts]
            places = range(draw, draw + len(tokens))
            results.append(
                RowResult(
                    row.request_id,
                    tokens,
                    bool(finite),
                    tuple(reports[place] for place in places if place in reports),
                    tuple(guesses) if finite else (),
                    tuple(chances[index].tolist()),
                )
            )
            draw += 1 if index < firsts else self.width
        return StepResult(tuple(results))
