"""The engine in the caller's process: requests in, steps, outputs."""

import logging
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from copy import deepcopy
from dataclasses import replace

from tercel.config import EngineConfig, SamplingParams
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan
from tercel.errors import ConfigError, EngineError
from tercel.runtime.cache_manager import CacheManager
from tercel.runtime.matcher import Matcher
from tercel.runtime.metrics import Counters, RequestClock, Stats, Usage
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.proposals import (
    SUFFIX,
    DrafterProposer,
    Proposer,
    Speculation,
    SuffixProposer,
)
from tercel.runtime.request import Request
from tercel.runtime.runner import OpenModel, ReportProgress
from tercel.runtime.scheduler import Scheduler
from tercel.runtime.sequence import Limits, Sequence

_LOG = logging.getLogger(__name__)


class Engine:
    """Call `step` while `has_work`; requests may be added and aborted between steps."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: ReportProgress | None = None,
        open_model: Callable[[EngineConfig], OpenModel],
    ) -> None:
        """Reads the model; everything that can be refused is refused before the weights load.

        Raises:
            ConfigError, CheckpointError: what is wrong, and the fix.
        """
        model = open_model(config)
        self.config = config
        self.tokenizer = model.tokenizer
        self.limits = Limits(_max_model_len(config, model), model.vocab_size)
        self._cache = CacheManager(
            num_pages=config.cache_tokens // config.page_size,
            num_slots=config.max_running,
            page_size=config.page_size,
        )
        self._speculation = _speculation(config, model)
        self._scheduler = Scheduler(
            self._cache,
            max_model_len=self.limits.max_model_len,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            speculation=self._speculation,
        )
        if self._scheduler.max_running < config.max_running:
            _LOG.warning(
                "max_running=%d is lowered to %d: every running request takes a token of each "
                "step, of which max_step_tokens=%d allows no more",
                config.max_running,
                self._scheduler.max_running,
                config.max_step_tokens,
            )
        self._seeds = random.Random(config.seed)
        self._counters = Counters()
        self._requests: dict[str, Request] = {}
        self._is_usable = True
        self._is_closed = False
        self._runner = model.load(progress)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add_request(
        self,
        request_id: str,
        prompt_ids: Tokens[int],
        params: SamplingParams,
        matcher: Matcher | None = None,
    ) -> None:
        """Queues a request; `matcher` restricts what it may write.

        Raises:
            RequestError: a field is outside the limits, or the id is in use.
            EngineError: the engine is closed or broken.
        """
        self._check_usable()
        self.limits.check(prompt_ids, params)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        sequence = Sequence(
            request_id,
            prompt_ids,
            params,
            max_model_len=self.limits.max_model_len,
            stop_ids=self.tokenizer.stop_ids,
            matcher=matcher,
        )
        self._scheduler.add(sequence)
        clock = RequestClock(time.monotonic())
        self._requests[request_id] = Request(
            sequence,
            self.tokenizer,
            clock,
            forced_acceptance=self.config.forced_acceptance is not None,
        )
        self._counters.num_prompt_tokens += len(prompt_ids)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once; its last output, or None if it is not running or waiting."""
        request = self._requests.get(request_id)
        return None if request is None else self._record(request.abort())

    def abort_all(self) -> list[RequestOutput]:
        """Ends every request; their last outputs."""
        return [self._record(request.abort()) for request in tuple(self._requests.values())]

    def step(self) -> list[RequestOutput]:
        """Runs one step; an output for every request that has new tokens or ended.

        Raises:
            EngineError: the engine is closed or broken. An error of the model itself passes
                through as it is and breaks the engine; Ctrl-C ends the requests of the step.
        """
        self._check_usable()
        plan = self._scheduler.schedule()
        if not plan.rows:
            return []
        started = time.monotonic()
        result = self._run(plan)
        self._counters.num_steps += 1
        self._counters.num_computed_tokens += plan.num_tokens
        self._counters.step_s.observe(time.monotonic() - started)
        progress = self._scheduler.update(plan, result)
        return [self._record(self._requests[p.sequence.request_id].advance(p)) for p in progress]

    def stats(self) -> Stats:
        """A snapshot of the load and of all counts since the start.

        Raises:
            EngineError: the engine is closed.
        """
        if self._is_closed:
            raise EngineError("the engine is closed; create another")
        usage = Usage(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            max_running=self._scheduler.max_running,
            num_pages=self._cache.num_pages,
            num_used_pages=self._cache.num_used_pages,
            num_slots=self._cache.num_slots,
            num_used_slots=self._cache.num_used_slots,
            num_preemptions=self._scheduler.num_preemptions,
        )
        rounds = None if self._speculation is None else deepcopy(self._speculation.counts)
        is_forced = self.config.forced_acceptance is not None
        calls = dict(self._runner.calls())
        return Stats(usage, deepcopy(self._counters), calls, rounds, is_forced)

    def check(self) -> None:
        """Raises EngineError where a rank of the model has died."""
        self._check_usable()
        self._runner.check()

    def close(self) -> None:
        """Frees the model; may be called again."""
        self._is_usable = False
        if not self._is_closed:
            self._is_closed = True
            self._runner.close()

    def _run(self, plan: StepPlan) -> StepResult:
        self._is_usable = False
        try:
            result = self._runner.run(plan)
        except KeyboardInterrupt:
            # Half a step leaves these requests' caches in between; all others are untouched.
            for row in plan.rows:
                self.abort(row.request_id)
            self._is_usable = True
            raise
        self._is_usable = True
        return result

    def _record(self, output: RequestOutput) -> RequestOutput:
        """Counts an output, and lets go of its request if that has ended."""
        clock, now = self._requests[output.request_id].clock, time.monotonic()
        clock.tokens(len(output.token_ids), now, self._counters)
        if output.finish_reason is not None:
            clock.finished(output.finish_reason, now, self._counters)
            self._scheduler.finish(output.request_id, output.finish_reason)
            del self._requests[output.request_id]
        return output

    def _check_usable(self) -> None:
        if not self._is_usable:
            raise EngineError("the engine is closed, or a step of it failed; create another")


def _speculation(config: EngineConfig, model: OpenModel) -> Speculation | None:
    if not model.max_drafts:
        return None
    proposer: Proposer
    if config.drafter == SUFFIX:
        proposer = SuffixProposer()
    else:
        proposer = DrafterProposer(model.max_drafts, config.min_confidence)
    return Speculation(
        proposer,
        max_drafts=model.max_drafts,
        verify_tokens=config.verify_tokens,
        adaptive=config.adaptive_drafts,
    )


def _max_model_len(config: EngineConfig, model: OpenModel) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return min(limit, config.cache_tokens)
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's {limit}; lower it"
        )
    return config.max_model_len
