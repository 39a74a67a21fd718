"""Draws the tokens of a step: gather the vocabulary, edit, sample or verify, report."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tercel.core.group import Group, SingleGroup
from tercel.core.inputs import DrawInputs, StepInputs, on_device
from tercel.core.sampling import Draws, StepResult, Stream, TokenLogprobs
from tercel.core.step import StepPlan
from tercel.runtime.edits import Edits
from tercel.runtime.forced import ForcedAcceptance
from tercel.runtime.verdict import Outcome, Verdict
from tercel.targets.binding import SAMPLING


class Sampler:
    """Every rank draws the same tokens: logits, parameters and randomness are equal on all.

    Drawing reads device tensors only, so that it can be captured; results come to the host once.
    """

    def __init__(
        self,
        group: Group,
        illegal_ids: Iterable[int],
        device: torch.device,
        *,
        sites: Mapping[str, Callable[..., Any]] | None = None,
        rule: str = "match",
        forced: ForcedAcceptance | None = None,
        counters: torch.Tensor | None = None,
    ) -> None:
        """`illegal_ids` are never drawn: padding, input-only slots, ids without a token. `sites`:
        implementations of SAMPLING's ops, by default the portable ones; `rule` is op accept's;
        `forced` replaces what that finds in benchmarks; `counters` are those of both ops."""
        if sites is None:
            sites = {site: op.portable.run for site, op in SAMPLING.items()}
        self._group = group
        self._device = device
        self._rule = rule
        self._forced = forced
        # Bound once like the sites of a program: Limits and SamplingParams keep the contract, and
        # checking it again would take longer than a greedy draw.
        self._draw: Callable[..., tuple[torch.Tensor, ...]] = sites["sample"]
        self._accept: Callable[..., tuple[torch.Tensor, ...]] = sites["accept"]
        self._penalize = sites["penalize"]
        self._logprobs = sites["logprobs"]
        self._counters = counters
        self._illegal = on_device(sorted(illegal_ids), torch.int64, device)

    def edits(self, plan: StepPlan) -> Edits | None:
        """What the host does to the logits of a step; None: nothing."""
        return Edits(plan, self._device, self._penalize) if plan.is_edited else None

    def run(
        self,
        shard: torch.Tensor,
        inputs: StepInputs,
        edits: Edits | None = None,
        draft_logits: torch.Tensor | None = None,
    ) -> Verdict:
        """Draws, and verifies drafts; nothing is read on the host.

        Args:
            shard: [S, vocabulary of this rank] f32, a row per draw of the step; may be written.
            draft_logits: [R * drafts, vocabulary of this rank] f32 that the drafts of the verify
                rows were drawn from; None: they are certain of themselves.
        """
        assert inputs.draws is not None, "a row samples"
        logits = self._group.all_gather(shard, dim=-1)
        logits.index_fill_(1, self._illegal, float("-inf"))
        reports = None if edits is None else edits.apply(logits)
        requests, verify = inputs.draws.anchors.shape[0], inputs.verify
        if verify is None or verify.width == 1:
            tokens, finite = self._sample(logits, inputs.draws, requests)
            accepted = torch.zeros_like(tokens)
            return Verdict(tokens.unsqueeze(1), accepted, finite, reports)
        plain = requests - verify.slots.shape[0]
        tokens, accepted, finite = self._verify(logits[plain:], inputs, plain, draft_logits)
        if plain:
            first, is_number = self._sample(logits[:plain], inputs.draws, plain)
            tokens = torch.cat((first.unsqueeze(1).expand(-1, verify.width), tokens))
            accepted = torch.cat((torch.zeros_like(first), accepted))
            finite = torch.cat((is_number, finite))
        return Verdict(tokens, accepted, finite, reports)

    def read(self, outcome: Outcome, plan: StepPlan) -> StepResult:
        """The results on the host, one per request that samples; waits for the device."""
        return outcome.read(plan, self._reports(outcome, plan))

    def _sample(
        self, logits: torch.Tensor, draws: DrawInputs, count: int
    ) -> tuple[torch.Tensor, ...]:
        """(tokens, finite) of the first `count` requests, a row of logits each."""
        return self._draw(
            logits,
            draws.temperature[:count],
            draws.top_k[:count],
            draws.top_p[:count],
            draws.min_p[:count],
            draws.seeds[:count],
            draws.anchors[:count] + 1,
            stream=int(Stream.TARGET),
            filtered=draws.kind is Draws.FILTERED,
            greedy=draws.kind is Draws.GREEDY,
            counters=self._counters,
        )

    def _verify(
        self,
        logits: torch.Tensor,
        inputs: StepInputs,
        first: int,
        draft_logits: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """(tokens, accepted, finite) of the verify rows, of several tokens each; they are the
        requests from `first` on."""
        draws, verify = inputs.draws, inputs.verify
        assert draws is not None and verify is not None
        if draft_logits is not None:
            draft_logits = self._group.all_gather(draft_logits, dim=-1)
        verified = self._accept(
            logits,
            inputs.drafts,
            draft_logits,
            verify.num_drafts,
            draws.temperature[first:],
            draws.top_k[first:],
            draws.top_p[first:],
            draws.min_p[first:],
            draws.seeds[first:],
            verify.context_lens,
            group=SingleGroup(),
            counters=self._counters,
            rule=self._rule,
            filtered=draws.kind is Draws.FILTERED,
            greedy=draws.kind is Draws.GREEDY,
        )
        if self._forced is not None:
            return self._forced.apply(verified, logits, inputs, draws.seeds[first:])
        return verified

    def _reports(self, outcome: Outcome, plan: StepPlan) -> dict[int, TokenLogprobs]:
        """By draw, for the draws that ask for them; those after a rejected draft mean nothing."""
        if outcome.reports is None:
            return {}
        asked = outcome.reports.draws
        sampled, width = plan.sampled, outcome.width
        firsts = len(sampled) - len(plan.verify)
        owner = [i if i < firsts else firsts + (i - firsts) // width for i in asked]
        wanted = [sampled[index].sampling.logprobs or 0 for index in owner]
        table = outcome.table[:, :width]
        of_draws = torch.cat((table[:firsts, 0], table[firsts:].flatten()))
        tokens = of_draws[on_device(asked, torch.int64, self._device)]
        columns = (tokens, *self._logprobs(outcome.reports.logits, tokens, top=max(wanted)))
        return {
            index: _token_logprobs(count, *values)
            for index, count, *values in zip(
                asked, wanted, *(column.tolist() for column in columns), strict=True
            )
        }


def _token_logprobs(
    count: int, token: int, chosen: float, values: list[float], ids: list[int], rank: int
) -> TokenLogprobs:
    return TokenLogprobs(token, chosen, rank, tuple(zip(ids[:count], values[:count], strict=True)))
