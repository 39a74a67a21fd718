"""Which rows run next: continuous batching, chunked prefill, preemption by recompute.

    waiting -> running (prefill in chunks, then decode) -> finished
       ^----- preempted: pages taken back, prompt and output prefilled again later

Requests start in the order of their arrival. Decode rows go first in every step, so prompts never
hold up running answers; the youngest request gives way when pages run out, so the oldest always
advances and every request ends.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tercel.core.sampling import GREEDY, RowResult, RowSampling, StepResult, TokenLogprobs
from tercel.core.step import Row, StepPlan
from tercel.errors import ConfigError, RequestError
from tercel.runtime.cache_manager import CacheManager
from tercel.runtime.proposals import Speculation
from tercel.runtime.sequence import FinishReason, Sequence

Drafts = tuple[tuple[int, ...], tuple[RowSampling, ...]]
"""Guesses, and how the token after each is drawn; see Sequence.sampling_of."""


@dataclass(frozen=True)
class Progress:
    """What a step did for one request."""

    sequence: Sequence
    tokens: tuple[int, ...]
    """New tokens."""
    logprobs: tuple[TokenLogprobs, ...]


class Scheduler:
    """Alternate `schedule` and `update`; requests may be added and finished at any time."""

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_model_len: int,
        max_running: int,
        max_step_tokens: int,
        speculation: Speculation | None = None,
    ) -> None:
        """`speculation` has running requests verify guesses; None: a token per step each.

        Raises:
            ConfigError: a request of max_model_len would not fit the cache.
        """
        if cache.pages_for(max_model_len) > cache.num_pages:
            raise ConfigError(
                f"max_model_len={max_model_len} does not fit the cache of "
                f"{cache.num_pages * cache.page_size} tokens; raise cache_tokens"
            )
        self._cache = cache
        self._max_step_tokens = max_step_tokens
        self._speculation = speculation
        self.max_running = min(max_running, max_step_tokens, cache.num_slots)
        """Requests that run together at most: every decode row takes a token of each step."""
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._in_flight: Mapping[str, Sequence] = {}
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, sequence: Sequence) -> None:
        """Queues a request that is within the limits.

        Raises:
            RequestError: another request of this id is not finished.
        """
        if sequence.request_id in self._by_id:
            raise RequestError("request_id", f"{sequence.request_id!r} is in use; choose another")
        self._by_id[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        """Ends a request now, whatever it is doing; None if there is no such request."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return None
        sequence.finish_reason = reason
        if sequence in self._running:
            self._running.remove(sequence)
            self._cache.free(request_id)
        else:
            self._waiting.remove(sequence)
        return sequence

    def schedule(self) -> StepPlan:
        """The next step; without rows if there is nothing to do."""
        preemptions = self.num_preemptions
        verify = self._decode_rows()
        budget = self._max_step_tokens - sum(row.num_tokens for row in verify)
        if self.num_preemptions == preemptions:
            self._admit(budget)
        prefill = self._prefill_rows(budget)
        self._in_flight = {row.request_id: self._by_id[row.request_id] for row in prefill + verify}
        decoding = len(verify) + sum(row.samples for row in prefill)
        drafts = 0 if self._speculation is None else self._speculation.wanted(decoding)
        return StepPlan(tuple(prefill), tuple(verify), self._cache.take_fresh_pages(), drafts)

    def update(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Records what the step of `plan` gave; ended requests have their finish_reason set."""
        for row in plan.prefill:
            self._in_flight[row.request_id].num_computed = row.seq_len
        verified = {row.request_id: row for row in plan.verify}
        progress = []
        for item in result.rows:
            sequence = self._in_flight[item.request_id]
            verify = verified.get(item.request_id)
            if not self._is_running(sequence):
                continue
            num_before = len(sequence.token_ids)
            for token in item.tokens:
                if sequence.finish_reason is None:
                    sequence.append(token)
            if verify is not None:
                # The token after the accepted ones has not been fed yet.
                sequence.num_computed = verify.context_len + max(len(item.tokens), 1)
            sequence.pending = max(len(item.tokens) - 1, 0)
            num_drafts = 0 if verify is None else verify.num_drafts
            self._remember(sequence, item, num_drafts, num_before)
            reason = sequence.finish_reason or (None if item.is_finite else "error")
            if reason:
                self.finish(item.request_id, reason)
            tokens = tuple(sequence.token_ids[num_before:])
            progress.append(Progress(sequence, tokens, item.logprobs[: len(tokens)]))
        return progress

    def _is_running(self, sequence: Sequence) -> bool:
        """False once a request has ended, also where another has taken its id since."""
        return self._by_id.get(sequence.request_id) is sequence

    def _remember(
        self, sequence: Sequence, item: RowResult, num_drafts: int, num_before: int
    ) -> None:
        if self._speculation is not None:
            num_tokens = len(sequence.token_ids)
            self._speculation.record(
                sequence.drafting,
                item,
                num_tokens=num_tokens,
                drafted=num_drafts,
                served=num_tokens - num_before,
            )

    def _decode_rows(self) -> list[Row]:
        drafts = self._drafts()
        width = 1 + max((len(found) for found, _ in drafts.values()), default=0)
        rows = []
        for sequence in tuple(self._running):
            while sequence in self._running and sequence.is_decoding:
                if self._cache.extend(sequence.request_id, sequence.num_computed + width):
                    rows.append(self._verify_row(sequence, drafts, width))
                    break
                self._preempt(self._running[-1])
        return rows

    def _drafts(self) -> dict[str, Drafts]:
        """What each decoding request verifies; nothing where that would take pages from others."""
        decoding = [sequence for sequence in self._running if sequence.is_decoding]
        if self._speculation is None or not decoding:
            return {}
        limit = self._speculation.limit(len(decoding))
        limit = min(limit, self._max_step_tokens // len(decoding) - 1)
        drafts = {}
        for sequence in decoding:
            # The last token of a request is never a draft: it comes from the row after one.
            most = min(limit, sequence.num_remaining - 1)
            found = self._speculation.propose(sequence.token_ids, sequence.drafting, most)
            drafts[sequence.request_id] = sequence.sampling_of(found)
        width = 1 + max(len(found) for found, _ in drafts.values())
        ends = {item.request_id: item.num_computed + width for item in decoding}
        return drafts if self._cache.can_extend(ends) else {}

    def _verify_row(self, sequence: Sequence, drafts: Mapping[str, Drafts], width: int) -> Row:
        """The last token and its drafts; a padding token brings the row to `width`."""
        found, after = drafts.get(sequence.request_id, ((), ()))
        held = self._cache[sequence.request_id]
        return Row(
            sequence.request_id,
            tokens=(sequence.token_ids[-1], *found, *(0,) * (width - 1 - len(found))),
            context_len=sequence.num_computed,
            slot=held.slot,
            pages=held.pages[: self._cache.pages_for(sequence.num_computed + width)],
            sampling=sequence.sampling(),
            num_drafts=len(found),
            after_drafts=after,
            pending=sequence.pending,
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue: it is older than all that wait."""
        self._running.remove(sequence)
        self._cache.free(sequence.request_id)
        sequence.num_computed = sequence.pending = 0
        sequence.drafting.latest = None
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> None:
        """Starts waiting requests, oldest first, while the step has tokens left for them.

        A request gets the pages of all its known tokens and the next one at once: a prefill never
        stops half-way for want of pages.
        """
        budget -= sum(item.num_uncomputed for item in self._running if not item.is_decoding)
        while self._waiting and budget > 0 and len(self._running) < self.max_running:
            sequence = self._waiting[0]
            if not self._cache.allocate(sequence.request_id, len(sequence.token_ids) + 1):
                return
            self._running.append(self._waiting.popleft())
            budget -= sequence.num_uncomputed

    def _prefill_rows(self, budget: int) -> list[Row]:
        rows = []
        for sequence in self._running:
            if not sequence.is_decoding and budget > 0:
                rows.append(self._row(sequence, self._chunk(sequence, budget)))
                budget -= rows[-1].num_tokens
        return rows

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens to prefill now; a chunk that is not the last one ends with a page if it can."""
        if sequence.num_uncomputed <= budget:
            return sequence.num_uncomputed
        end = sequence.num_computed + budget
        aligned = end - end % self._cache.page_size - sequence.num_computed
        return aligned if aligned > 0 else budget

    def _row(self, sequence: Sequence, num_tokens: int) -> Row:
        held = self._cache[sequence.request_id]
        end = sequence.num_computed + num_tokens
        samples = end == len(sequence.token_ids)
        return Row(
            sequence.request_id,
            tokens=tuple(sequence.token_ids[sequence.num_computed : end]),
            context_len=sequence.num_computed,
            slot=held.slot,
            pages=held.pages[: self._cache.pages_for(end)],
            samples=samples,
            sampling=sequence.sampling() if samples else GREEDY,
        )
