from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.config import EngineConfig, SamplingParams
from tercel.core.sampling import TokenLogprobs
from tercel.errors import ConfigError, EngineError, RequestError
from tercel.runtime.engine import Engine
from tercel.runtime.metrics import RequestClock
from tercel.runtime.request import Request
from tercel.runtime.scheduler import Progress
from tercel.runtime.sequence import Sequence
from tests.runtime.fakes import TOKENIZER, letters, open_fake, run_alone

CONFIG = EngineConfig(page_size=4, cache_tokens=64, max_running=4, max_step_tokens=16)
PROMPT = TOKENIZER.encode("hello")


def create(config=CONFIG, **options):
    return Engine(config, open_model=partial(open_fake, **options))


def writes(text):
    """A model that writes `text`, a token at a time, after PROMPT."""
    tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_id]
    return lambda history, seed, vocab_size: tokens[len(history) - len(PROMPT)]


@dataclass
class Whole:
    """All outputs of one request, added up."""

    token_ids: tuple = ()
    text: str = ""
    logprobs: tuple = ()
    last: object = None

    def add(self, output):
        assert self.last is None, "an output after the last one"
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        assert output.completion_tokens == len(self.token_ids)
        if output.finish_reason:
            self.last = output


def run(engine, requests):
    whole = {}
    for name, params in requests.items():
        engine.add_request(name, PROMPT, params)
        whole[name] = Whole()
    while engine.has_work:
        for output in engine.step():
            whole[output.request_id].add(output)
    return whole


def run_one(params, **options):
    whole = run(create(**options), {"a": params})["a"]
    return whole.text, whole.last.finish_reason, whole.last.stop_reason


requests = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.text("hello ü", min_size=1, max_size=30),
        st.builds(
            SamplingParams,
            max_tokens=st.integers(10, 50),
            min_tokens=st.integers(0, 10),
            seed=st.integers(0, 1000),
            ignore_eos=st.booleans(),
            stop=st.lists(st.text("abcé ", min_size=1, max_size=3), max_size=2).map(tuple),
        ),
        st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=8,
)
configs = st.builds(
    EngineConfig,
    page_size=st.sampled_from([1, 4, 16]),
    cache_tokens=st.just(64),
    max_running=st.integers(1, 5),
    max_step_tokens=st.integers(1, 24),
)


@given(configs, requests)
@settings(max_examples=60, deadline=None)
def test_the_text_of_a_request_does_not_depend_on_the_others(config, requests):
    engine, whole, step = create(config), {}, 0
    waiting = dict(enumerate(requests))
    while waiting or engine.has_work:
        for number, (at_step, prompt, params, _) in list(waiting.items()):
            if at_step <= step:
                engine.add_request(str(number), TOKENIZER.encode(prompt), params)
                whole[number] = Whole()
                del waiting[number]
        for number, (at_step, _, _, cancel_after) in enumerate(requests):
            if cancel_after is not None and step == at_step + cancel_after:
                last = engine.abort(str(number))
                if last is not None:
                    whole[number].add(last)
        for output in engine.step():
            whole[int(output.request_id)].add(output)
        step += 1
    for number, (_, prompt, params, _) in enumerate(requests):
        alone = run_request_alone(config, prompt, params)
        if whole[number].last.finish_reason == "abort":
            count = len(whole[number].token_ids)
            assert whole[number].token_ids == alone.token_ids[:count]
        else:
            assert whole[number].text == alone.text
            assert whole[number].token_ids == alone.token_ids
            for field in ("finish_reason", "stop_reason", "prompt_tokens", "completion_tokens"):
                assert getattr(whole[number].last, field) == getattr(alone.last, field)
    assert engine.stats().usage.num_used_pages == engine.stats().usage.num_used_slots == 0


def run_request_alone(config, prompt, params):
    engine, whole = create(config), Whole()
    engine.add_request("alone", TOKENIZER.encode(prompt), params)
    while engine.has_work:
        for output in engine.step():
            whole.add(output)
    tokens, _ = run_alone(
        TOKENIZER.encode(prompt),
        params,
        max_model_len=engine.limits.max_model_len,
        stop_ids=() if params.ignore_eos else TOKENIZER.stop_ids,
        vocab_size=TOKENIZER.vocab_size,
        draw=letters,
    )
    assert whole.token_ids == tuple(tokens[: len(whole.token_ids)])
    return whole


def test_stop_strings():
    stop = partial(SamplingParams, max_tokens=20)
    model = {"draw": writes("pop qux zoo")}
    assert run_one(stop(), **model) == ("pop qux zoo", "stop", None)
    assert run_one(stop(stop=("qux",)), **model) == ("pop ", "stop", "qux")
    assert run_one(stop(stop=("p qux z", "zoo")), **model) == ("po", "stop", "p qux z")
    assert run_one(stop(stop=("oo!",)), **model) == ("pop qux zoo", "stop", None)
    assert run_one(stop(stop=("qux",), max_tokens=6), **model) == ("pop qu", "length", None)
    assert run_one(stop(stop=("qux",), max_tokens=7), **model) == ("pop ", "stop", "qux")
    assert run_one(stop(stop=("o",), min_tokens=6), **model)[0] == "pop qux z"


def test_stop_tokens_are_not_part_of_the_text():
    token = TOKENIZER.encode("w")[0]
    params = SamplingParams(max_tokens=20, stop_token_ids=(token,))
    whole = run(create(draw=writes("one two")), {"a": params})["a"]
    assert (whole.text, whole.last.stop_reason) == ("one t", token)
    assert whole.token_ids[-1] == token


def test_tokens_after_a_stop_string_are_dropped():
    sequence = Sequence("a", PROMPT, SamplingParams(seed=0, stop=("q",)), max_model_len=64)
    request = Request(sequence, TOKENIZER, RequestClock(0.0))
    tokens = tuple(TOKENIZER.encode("pqx"))
    logprobs = tuple(TokenLogprobs(token, -1.0, 1) for token in tokens)
    output = request.advance(Progress(sequence, tokens, logprobs))
    assert (output.text, output.token_ids, output.logprobs) == ("p", tokens[:2], logprobs[:2])
    assert (output.finish_reason, output.completion_tokens) == ("stop", 2)


def test_the_context_limit_ends_a_request():
    config = EngineConfig(page_size=4, cache_tokens=64, max_model_len=8, max_step_tokens=16)
    whole = run(create(config), {"a": SamplingParams(max_tokens=50, ignore_eos=True)})["a"]
    assert (whole.last.finish_reason, whole.last.completion_tokens) == ("length", 3)
    assert whole.last.prompt_tokens == 5


def test_a_row_that_is_not_finite_says_so():
    engine = create(not_finite={("a", 7)})
    params = SamplingParams(seed=1, max_tokens=5, ignore_eos=True)
    whole = run(engine, {"a": params, "b": params})
    assert whole["a"].last.finish_reason == "error"
    assert "token 7" in whole["a"].last.error
    assert whole["b"].last.finish_reason == "length"
    assert whole["b"].last.error is None
    assert engine.stats().counters.num_finished == {"error": 1, "length": 1}


def test_seeds_are_drawn_from_the_engines():
    def outputs(seed):
        config = EngineConfig(page_size=4, cache_tokens=64, max_step_tokens=16, seed=seed)
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        whole = run(create(config), {"a": params, "b": params})
        return whole["a"].token_ids, whole["b"].token_ids

    assert outputs(1) == outputs(1)
    assert outputs(1) != outputs(2)
    assert outputs(1)[0] != outputs(1)[1]


def test_logprobs_come_with_the_tokens():
    whole = run(create(), {"a": SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True)})["a"]
    assert [item.token for item in whole.logprobs] == list(whole.token_ids)


def test_stats():
    engine = create()
    run(engine, {name: SamplingParams(max_tokens=5, ignore_eos=True) for name in "abcdef"})
    stats = engine.stats()
    assert stats.counters.num_prompt_tokens == 6 * len(PROMPT)
    assert stats.counters.num_generated_tokens == 30
    assert stats.counters.num_finished == {"length": 6}
    assert stats.counters.num_computed_tokens == 6 * (len(PROMPT) + 4)
    for histogram in ("time_to_first_token_s", "time_per_output_token_s", "request_s"):
        assert sum(getattr(stats.counters, histogram).counts) == 6
    assert sum(stats.counters.step_s.counts) == stats.counters.num_steps
    assert (stats.usage.num_pages, stats.usage.num_slots, stats.usage.max_running) == (16, 4, 4)
    assert stats.program_calls == {"fake": stats.counters.num_steps}


def test_progress_is_reported():
    seen = []
    Engine(CONFIG, open_model=open_fake, progress=lambda *report: seen.append(report))
    assert seen == [(1, 1)]


def test_a_smaller_number_of_running_requests_is_said(caplog):
    config = EngineConfig(page_size=4, cache_tokens=64, max_running=4, max_step_tokens=3)
    assert create(config).stats().usage.max_running == 3
    assert "max_running=4 is lowered to 3" in caplog.text


def test_refused_before_the_weights_load():
    for options, message in (
        ({"max_model_len": 128, "cache_tokens": 256}, "exceeds the model's 64"),
        ({"max_model_len": 64, "cache_tokens": 32}, "raise cache_tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            create(EngineConfig(page_size=4, **options), draw=None)


def test_a_refused_request_leaves_the_engine_usable():
    engine = create()
    with pytest.raises(RequestError, match="context limit of 64 tokens"):
        engine.add_request("a", PROMPT * 20, SamplingParams())
    engine.add_request("a", PROMPT, SamplingParams())
    with pytest.raises(RequestError, match="request_id"):
        engine.add_request("a", PROMPT, SamplingParams())
    assert engine.abort("a").finish_reason == "abort"
    assert engine.abort("a") is None
    assert not engine.has_work


def test_a_closed_engine_says_so():
    engine = create()
    engine.close()
    engine.close()
    for call in (engine.step, engine.stats):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_an_engine_whose_model_failed_refuses_work():
    def fail(history, seed, vocab_size):
        raise RuntimeError("device lost")

    engine = create(draw=fail)
    engine.add_request("a", PROMPT, SamplingParams())
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    with pytest.raises(EngineError):
        engine.step()
    with pytest.raises(EngineError):
        engine.add_request("b", PROMPT, SamplingParams())
    engine.close()
