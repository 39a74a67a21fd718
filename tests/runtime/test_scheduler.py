import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.config import SamplingParams
from tercel.core.sampling import RowResult, StepResult
from tercel.core.step import StepPlan
from tercel.errors import ConfigError, EngineError, RequestError
from tercel.runtime.cache_manager import CacheManager
from tercel.runtime.proposals import DrafterProposer, Speculation, SuffixProposer
from tercel.runtime.scheduler import Scheduler
from tercel.runtime.sequence import Limits, Sequence
from tests.runtime.fakes import ShadowRunner, run_alone

VOCAB = 50
STOP = frozenset({7})


@dataclass(frozen=True)
class Pool:
    page_size: int = 4
    num_pages: int = 8
    max_running: int = 4
    max_step_tokens: int = 8
    max_model_len: int = 32
    max_drafts: int = 0
    proposer: str = "drafter"
    verify_tokens: int = 64

    def speculation(self):
        if not self.max_drafts:
            return None
        suffix = self.proposer == "suffix"
        proposer = SuffixProposer() if suffix else DrafterProposer(self.max_drafts)
        return Speculation(
            proposer,
            max_drafts=self.max_drafts,
            verify_tokens=self.verify_tokens,
            adaptive=True,
        )

    def build(self, **options):
        cache = CacheManager(
            num_pages=self.num_pages, num_slots=self.max_running, page_size=self.page_size
        )
        scheduler = Scheduler(
            cache,
            max_model_len=self.max_model_len,
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            speculation=self.speculation(),
        )
        runner = ShadowRunner(
            page_size=self.page_size,
            vocab_size=VOCAB,
            max_step_tokens=self.max_step_tokens,
            **options,
        )
        return cache, scheduler, runner

    def sequence(self, request_id, prompt, params, stop_ids=STOP):
        return Sequence(
            request_id, prompt, params, max_model_len=self.max_model_len, stop_ids=stop_ids
        )

    def alone(self, sequence):
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        limits = {"max_model_len": self.max_model_len, "vocab_size": VOCAB}
        return run_alone(prompt, sequence.params, stop_ids=STOP, **limits)


@dataclass(frozen=True)
class Arrival:
    at_step: int
    prompt: tuple[int, ...]
    max_tokens: int
    cancel_after: int | None

    def sequence(self, pool, number):
        params = SamplingParams(max_tokens=self.max_tokens, seed=number)
        return pool.sequence(f"r{number}", self.prompt, params)


def run_all(pool, arrivals, **options):
    """Runs the arrivals to their end, checking invariants in every step; the sequences by id."""
    cache, scheduler, runner = pool.build(pad_rows_to=pool.max_running, **options)
    sequences = [arrival.sequence(pool, number) for number, arrival in enumerate(arrivals)]
    order = sorted(range(len(arrivals)), key=lambda number: arrivals[number].at_step)
    live, started, step = [], [], 0
    while order or scheduler.has_work:
        while order and arrivals[order[0]].at_step <= step:
            live.append(sequences[order.pop(0)])
            scheduler.add(live[-1])
        for number, arrival in enumerate(arrivals):
            if arrival.cancel_after is not None and step == arrival.at_step + arrival.cancel_after:
                scheduler.finish(f"r{number}", "abort")
        live = [sequence for sequence in live if sequence.request_id in scheduler]
        plan = scheduler.schedule()
        cache.check()
        check_fair(plan, live, started)
        if live:
            scheduler.update(plan, runner.run(plan))
        step += 1
    assert (cache.num_used_pages, cache.num_used_slots) == (0, 0)
    cache.check()
    return sequences, scheduler


def check_fair(plan, live, started):
    rows = {row.request_id: row for row in plan.rows}
    if live:
        assert live[0].request_id in rows, "the oldest request did not advance"
    for row in plan.prefill:
        if row.context_len == 0 and row.request_id not in started:
            started.append(row.request_id)
    firsts = [sequence.request_id for sequence in live if sequence.request_id in started]
    assert [sequence.request_id for sequence in live][: len(firsts)] == firsts, "overtaken"
    for sequence in live:
        if sequence.is_decoding and sequence.request_id not in rows:
            raise AssertionError("a decoding request was left out")


tokens = st.integers(0, VOCAB - 1)
arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 20),
        prompt=st.lists(tokens, min_size=1, max_size=31).map(tuple),
        max_tokens=st.integers(1, 40),
        cancel_after=st.none() | st.integers(0, 15),
    ),
    min_size=1,
    max_size=12,
)
pools = st.builds(
    Pool,
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_pages=st.just(32),
    max_running=st.integers(1, 6),
    max_step_tokens=st.integers(1, 40),
    max_drafts=st.sampled_from([0, 1, 3, 7]),
    proposer=st.sampled_from(["drafter", "suffix"]),
    verify_tokens=st.integers(2, 40),
).map(lambda pool: Pool(**{**vars(pool), "num_pages": 32 // pool.page_size}))


@given(pools, arrivals)
@settings(max_examples=100, deadline=None)
def test_every_request_gives_what_it_gives_alone(pool, arrivals):
    sequences, _ = run_all(pool, arrivals)
    for sequence, arrival in zip(sequences, arrivals, strict=True):
        alone, reason = pool.alone(sequence)
        if sequence.finish_reason == "abort":
            assert arrival.cancel_after is not None
            assert sequence.output_ids == alone[: sequence.num_output_tokens]
        else:
            assert (sequence.output_ids, sequence.finish_reason) == (alone, reason)


@given(pools, arrivals, st.data())
@settings(max_examples=50, deadline=None)
def test_a_row_that_is_not_finite_ends_its_own_request_only(pool, arrivals, data):
    number = data.draw(st.integers(0, len(arrivals) - 1))
    position = len(arrivals[number].prompt) + data.draw(st.integers(0, 3))
    sequences, _ = run_all(pool, arrivals, not_finite={(f"r{number}", position)})
    for other, sequence in enumerate(sequences):
        alone, reason = pool.alone(sequence)
        if sequence.finish_reason == "error":
            assert other == number
            assert len(sequence.token_ids) == position
        elif sequence.finish_reason != "abort":
            assert (sequence.output_ids, sequence.finish_reason) == (alone, reason)


def test_hundreds_of_requests_leave_everything_free():
    rng = random.Random(3)
    pool = Pool(page_size=4, num_pages=64, max_running=8, max_step_tokens=32, max_model_len=128)
    arrivals = [
        Arrival(
            at_step=rng.randrange(180),
            prompt=tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 70))),
            max_tokens=rng.randrange(1, 40),
            cancel_after=rng.choice([None, None, rng.randrange(80)]),
        )
        for _ in range(300)
    ]
    sequences, scheduler = run_all(pool, arrivals)
    assert scheduler.num_preemptions > 10
    assert {"stop", "length", "abort"} == {item.finish_reason for item in sequences}


@pytest.mark.parametrize("max_step_tokens", range(1, 24))
def test_chunks_of_every_size(max_step_tokens):
    pool = Pool(max_step_tokens=max_step_tokens, max_running=1)
    sequences, _ = run_all(pool, [Arrival(0, tuple(range(10, 31)), 5, None)])
    assert (sequences[0].output_ids, sequences[0].finish_reason) == pool.alone(sequences[0])


def test_a_chunk_ends_with_a_page_but_for_the_last():
    pool = Pool(max_step_tokens=7)
    _, scheduler, runner = pool.build()
    scheduler.add(pool.sequence("a", range(10, 25), SamplingParams(max_tokens=1, seed=0)))
    chunks = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        chunks.append(plan.rows[0].num_tokens)
        scheduler.update(plan, runner.run(plan))
    assert chunks == [4, 4, 7]


def test_the_pool_fills_to_the_last_page():
    pool = Pool(num_pages=8, max_running=4, max_step_tokens=32)
    cache, scheduler, runner = pool.build(pad_rows_to=6, draw=lambda *_: 1)
    for name in "abcd":
        scheduler.add(pool.sequence(name, [1] * 6, SamplingParams(max_tokens=2, seed=0)))
    plan = scheduler.schedule()
    assert (cache.num_used_pages, cache.num_used_slots) == (8, 4)
    scheduler.update(plan, runner.run(plan))
    plan = scheduler.schedule()
    assert len(plan.verify) == 4
    scheduler.update(plan, runner.run(plan))
    assert not scheduler.has_work


def test_the_youngest_gives_way_and_resumes():
    pool = Pool(num_pages=4, max_model_len=16, max_running=2, max_step_tokens=32)
    _, scheduler, runner = pool.build(draw=lambda *_: 1)
    params = SamplingParams(max_tokens=6, seed=0)
    old, young = (pool.sequence(name, [1] * 7, params) for name in ("old", "young"))
    scheduler.add(old)
    scheduler.add(young)
    while old.finish_reason is None:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
    assert scheduler.num_preemptions == 1
    assert young.num_computed == 0 and young.num_output_tokens == 2
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
    assert young.num_output_tokens == 6


def test_cancelled_between_schedule_and_update():
    pool = Pool()
    cache, scheduler, runner = pool.build()
    params = SamplingParams(max_tokens=9, seed=0)
    scheduler.add(pool.sequence("a", [1, 2, 3], params))
    plan = scheduler.schedule()
    scheduler.finish("a", "abort")
    again = pool.sequence("a", [4, 5], params)
    scheduler.add(again)
    assert scheduler.update(plan, runner.run(plan)) == []
    assert again.num_computed == 0 and again.num_output_tokens == 0
    assert cache.num_used_pages == 0


def test_tokens_after_the_last_one_are_dropped():
    pool = Pool()
    _, scheduler, _ = pool.build()
    scheduler.add(pool.sequence("a", [1, 2, 3], SamplingParams(max_tokens=9, seed=0)))
    plan = scheduler.schedule()
    (progress,) = scheduler.update(plan, StepResult((RowResult("a", (5, 7, 9)),)))
    assert progress.tokens == (5, 7)
    assert progress.sequence.finish_reason == "stop"
    assert not scheduler.has_work


def test_the_plan_travels():
    pool = Pool()
    _, scheduler, _ = pool.build()
    params = SamplingParams(
        seed=2**62, repetition_penalty=1.2, logit_bias={3: 1.5}, min_tokens=4, logprobs=2
    )
    scheduler.add(pool.sequence("a", [1, 2, 2], params))
    plan = scheduler.schedule()
    sampling = plan.rows[0].sampling
    assert sampling.history == ((1, 0), (2, 0))
    assert sampling.bias == ((3, 1.5), (7, float("-inf")))
    assert plan.draws == ((plan.rows[0], 3),)
    packed = msgspec.msgpack.encode(plan)
    assert msgspec.msgpack.decode(packed, type=StepPlan) == plan


def test_penalties_count_the_output_only():
    params = SamplingParams(seed=0, presence_penalty=0.5)
    sequence = Pool().sequence("a", [1, 2, 2], params)
    for token in (2, 5, 5):
        sequence.append(token)
    assert sequence.sampling().history == ((2, 1), (5, 2))


def test_stop_tokens():
    def end(stop_ids=STOP, **params):
        sequence = Pool().sequence("a", [1], SamplingParams(seed=0, **params), stop_ids)
        for token in (5, 7, 9):
            if sequence.finish_reason is None:
                sequence.append(token)
        return sequence.output_ids, sequence.finish_reason, sequence.stop_reason

    assert end() == ([5, 7], "stop", None)
    assert end(ignore_eos=True) == ([5, 7, 9], None, None)
    assert end(stop_token_ids=(5,)) == ([5], "stop", 5)
    assert end(min_tokens=2) == ([5, 7, 9], None, None)
    assert end(max_tokens=2) == ([5, 7], "stop", None)
    assert end(max_tokens=1) == ([5], "length", None)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([1] * 32, {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ],
)
def test_refused_requests(prompt, params, field):
    with pytest.raises(RequestError) as caught:
        Limits(max_model_len=32, vocab_size=VOCAB).check(prompt, SamplingParams(**params))
    assert caught.value.field == field


def test_an_id_in_use_is_refused():
    pool = Pool()
    _, scheduler, _ = pool.build()
    params = SamplingParams(seed=0)
    scheduler.add(pool.sequence("a", [1], params))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(pool.sequence("a", [1], params))


def test_a_length_that_can_never_fit_is_refused():
    with pytest.raises(ConfigError, match="raise cache_tokens"):
        Pool(num_pages=7).build()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_cache_manager_never_overcommits(data):
    cache = CacheManager(num_pages=6, num_slots=3, page_size=4)
    held = {}
    for _ in range(data.draw(st.integers(1, 30))):
        name = data.draw(st.sampled_from("abcde"))
        size = data.draw(st.integers(1, 30))
        before = (cache.num_used_pages, cache.num_used_slots)
        if name not in held:
            fits = before[0] + cache.pages_for(size) <= 6 and before[1] < 3
            assert cache.allocate(name, size) is fits
            held |= {name: size} if fits else {}
        elif data.draw(st.booleans()):
            more = max(0, cache.pages_for(size) - len(cache[name].pages))
            assert cache.extend(name, size) is (before[0] + more <= 6)
        else:
            cache.free(name)
            del held[name]
        cache.check()


def test_cache_manager_finds_broken_books():
    cache = CacheManager(num_pages=3, num_slots=2, page_size=4)
    cache.allocate("a", 8)
    with pytest.raises(EngineError, match="already holds"):
        cache.allocate("a", 1)
    cache._free_pages.append(cache["a"].pages[0])
    with pytest.raises(EngineError, match="page bookkeeping"):
        cache.check()
