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

from tercel.core.sampling import GREEDY, StepResult, TokenLogprobs
from tercel.core.step import Row, StepPlan
from tercel.errors import ConfigError, RequestError
from tercel.runtime.cache_manager import CacheManager
from tercel.runtime.sequence import FinishReason, Sequence


@dataclass(frozen=True)
class Progress:
    """What a step did for one request."""

    sequence: Sequence
    tokens: tuple[int, ...]
    """New tokens; none where the row was not finite."""
    logprobs: tuple[TokenLogprobs, ...]


class Scheduler:
    """Alternate `schedule` and `update`; requests may be added and finished at any time."""

    def __init__(
        self, cache: CacheManager, *, max_model_len: int, max_running: int, max_step_tokens: int
    ) -> None:
        """
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
        budget = self._max_step_tokens - len(verify)
        if self.num_preemptions == preemptions:
            self._admit(budget)
        prefill = self._prefill_rows(budget)
        self._in_flight = {row.request_id: self._by_id[row.request_id] for row in prefill + verify}
        return StepPlan(tuple(prefill), tuple(verify), self._cache.take_fresh_pages())

    def update(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Records what the step of `plan` gave; ended requests have their finish_reason set."""
        for row in plan.rows:
            self._in_flight[row.request_id].num_computed = row.seq_len
        progress = []
        for item in result.rows:
            sequence = self._in_flight[item.request_id]
            if not self._is_running(sequence):
                continue
            num_before = len(sequence.token_ids)
            for token in item.tokens:
                if sequence.finish_reason is None:
                    sequence.append(token)
            reason = sequence.finish_reason if item.is_finite else "error"
            if reason:
                self.finish(item.request_id, reason)
            tokens = tuple(sequence.token_ids[num_before:])
            progress.append(Progress(sequence, tokens, item.logprobs[: len(tokens)]))
        return progress

    def _is_running(self, sequence: Sequence) -> bool:
        """False once a request has ended, also where another has taken its id since."""
        return self._by_id.get(sequence.request_id) is sequence

    def _decode_rows(self) -> list[Row]:
        rows = []
        for sequence in tuple(self._running):
            while sequence in self._running and sequence.is_decoding:
                if self._cache.extend(sequence.request_id, len(sequence.token_ids)):
                    rows.append(self._row(sequence, num_tokens=1))
                    break
                self._preempt(self._running[-1])
        return rows

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue: it is older than all that wait."""
        self._running.remove(sequence)
        self._cache.free(sequence.request_id)
        sequence.num_computed = 0
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
