"""Guesses in the engine: the text is that of plain decoding, whatever is guessed, and each feature
of a request holds inside a block of accepted tokens."""

import random
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from tercel import LLM, SamplingParams
from tercel.core.sampling import RowResult, RowSampling
from tercel.core.step import Row, StepPlan
from tercel.errors import ConfigError
from tercel.gates.acceptance import AcceptanceGate, read_record, record, unhealthy
from tercel.gates.problems import generate
from tercel.parallel import SingleGroup
from tercel.runtime.chat import encode, render
from tercel.runtime.proposals import (
    DrafterProposer,
    DraftState,
    RoundCounts,
    Speculation,
    SuffixProposer,
)
from tercel.runtime.sampler import Sampler
from tercel.runtime.sequence import Sequence
from tests.runtime.steps import drawn

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NANO, DRAFTER = CHECKPOINTS / "nano", CHECKPOINTS / "nano-dspark"
SMALL = {"page_size": 16, "cache_tokens": 2048, "max_running": 4, "num_threads": 1}
VOCAB = 16
CPU = torch.device("cpu")


def open_llm(**options):
    return LLM(NANO, device="cpu", **{**SMALL, **options})


@pytest.fixture(scope="module")
def prompts():
    problems = islice(generate(seed=31), 3)
    with open_llm() as llm:
        return [
            encode(llm.tokenizer, render([{"role": "user", "content": each.question}]))
            for each in problems
        ]


@pytest.fixture(scope="module")
def plain(prompts):
    """By name of the parameters: the completions of plain decoding."""
    with open_llm() as llm:
        return {name: llm.generate(prompts, params) for name, params in PARAMS.items()}


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=32),
    "warm": SamplingParams(temperature=1, top_k=8, top_p=0.95, seed=4, max_tokens=24),
    "penalties": SamplingParams(
        temperature=0,
        max_tokens=16,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        logit_bias={300: -5.0},
    ),
    "logprobs": SamplingParams(temperature=0, max_tokens=12, logprobs=2),
    "limits": SamplingParams(temperature=0, max_tokens=13, min_tokens=13, stop_token_ids=(40,)),
}


def same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
        assert mine.completion_tokens == other.completion_tokens
        assert [x.token for x in mine.logprobs] == [x.token for x in other.logprobs]
        for a, b in zip(mine.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 40, "cache_tokens": 640}])
def test_the_text_is_that_of_plain_decoding(prompts, plain, options):
    """Also with prompts in chunks, beside verifying requests, and pages that run out."""
    with open_llm(drafter=str(DRAFTER), **options) as llm:
        for name, params in PARAMS.items():
            completions = llm.generate(prompts, params)
            same(completions, plain[name])
            if name == "greedy":
                assert sum(each.accepted_tokens for each in completions) > 40
        calls = llm.engine.stats().program_calls
        work = llm.engine._runner._work
        assert work._drafting._drafter.plan.embed is work._program.weights.embed
    assert calls["drafter.markov_chain:markov_chain:portable"] > 0
    assert calls["drafter.context_kv:context_kv:portable"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
def test_other_rules_are_greedy_at_temperature_zero(prompts, plain, rule):
    with open_llm(drafter=str(DRAFTER), acceptance=rule) as llm:
        same(llm.generate(prompts, PARAMS["greedy"]), plain["greedy"])
        warm = llm.generate(prompts, PARAMS["warm"])
        assert warm == llm.generate(prompts, PARAMS["warm"]), "seeds repeat"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp1_pp2"])
def test_ranks_draft_alike(prompts, plain, layout):
    """Taps of both stages reach the last one, and every rank of a stage keeps the same guesses."""
    with open_llm(drafter=str(DRAFTER), layout=layout) as llm:
        completions = llm.generate(prompts, PARAMS["warm"])
    same(completions, plain["warm"])
    assert sum(each.accepted_tokens for each in completions) > 30


def test_without_a_model_the_text_repeats_itself(prompts, plain):
    with open_llm(drafter="suffix") as llm:
        completions = llm.generate(prompts, PARAMS["greedy"])
    same(completions, plain["greedy"])
    assert all(each.rounds > 0 for each in completions)


def test_forced_acceptance_is_said_in_every_output(prompts):
    with open_llm(drafter="suffix", forced_acceptance=1.5, adaptive_drafts=False) as llm:
        outputs = list(llm.generate(prompts[0], PARAMS["greedy"], stream=True))
        stats = llm.engine.stats()
    assert all(output.forced_acceptance for output in outputs) and stats.forced_acceptance
    full = stats.rounds.tried_at_position[1]
    assert stats.rounds.at_position[0] / full > 0.9, "one always where there were two"
    assert 0.2 < stats.rounds.at_position[1] / full < 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "missing"}, "missing"),
        ({"drafter": str(DRAFTER), "max_drafts": 9}, "drafts per step: 9"),
        ({"forced_acceptance": 2.0}, r"forced_acceptance=2.0: .* set drafter"),
        ({"acceptance": "token"}, "acceptance='token': .* set drafter"),
        ({"max_drafts": 3}, "max_drafts=3: .* set drafter"),
        ({"drafter": str(DRAFTER), "forced_acceptance": 7.5}, r"=7.5: 7 guesses .* choose 0 .. 7"),
        ({"drafter": "suffix", "max_drafts": 2, "forced_acceptance": 3}, "choose 0 .. 2"),
        ({"drafter": "suffix", "max_drafts": 0}, "max_drafts=0 is outside"),
        ({"drafter": "suffix", "verify_tokens": 1}, "verify_tokens=1"),
        ({"drafter": "suffix", "min_confidence": 2}, "min_confidence=2"),
        ({"drafter": "suffix", "acceptance": "greedy"}, "acceptance='greedy'"),
    ],
)
def test_refusals_name_the_field(options, message):
    with pytest.raises(ConfigError, match=message):
        open_llm(**options)


def rounds_of(*accepted):
    """Rounds of three guesses each."""
    counts = RoundCounts()
    for each in accepted:
        counts.add(3, each)
    return counts


def test_the_gate_finds_what_is_not_healthy(tmp_path):
    counts = rounds_of(3, 3, 2, 0)
    assert counts.acceptance_length == 3 and counts.per_position == [0.75, 0.75, 0.5]
    assert counts.conditional == [0.75, 1.0, pytest.approx(2 / 3)]

    @dataclass
    class Measured:
        temperature: float
        rounds: RoundCounts

    gate = AcceptanceGate(problems=4)
    healthy = record([Measured(0.0, counts)], gate)["temperatures"]
    assert unhealthy([Measured(0.0, counts)], healthy) == []
    worse = (3, 3, 2, 0, 0)
    found = unhealthy([Measured(0.0, rounds_of(*worse * 400))], healthy)
    assert len(found) == 4
    assert "acceptance length is 2.600, recorded 3.000, at least 2.890 in 2000 rounds" in found[0]
    assert unhealthy([Measured(0.0, rounds_of(*worse))], healthy) == [], "five rounds are chance"
    none = unhealthy([Measured(0.0, rounds_of(*[0] * 40))], healthy)
    assert len(none) == 4, "and forty without a guess accepted are not"
    assert read_record(tmp_path) == {}


def verify_rows(drafts, samplings, after=()):
    return tuple(
        Row(
            str(index),
            (1, *row),
            4,
            index + 1,
            (1, 2),
            sampling=sampling,
            num_drafts=len(row),
            after_drafts=tuple(after),
        )
        for index, (row, sampling) in enumerate(zip(drafts, samplings, strict=True))
    )


def test_a_prefill_row_and_verify_rows_share_a_step():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1 + 2 * 3, VOCAB, generator=generator)
    best = logits.argmax(-1).tolist()
    right, wrong = (best[1], best[2]), (best[4], (best[5] + 1) % VOCAB)
    greedy = RowSampling(logprobs=1)
    prefill = Row("p", (7, 8), 0, 3, (3,), sampling=greedy)
    plan = StepPlan((prefill,), verify_rows((right, wrong), (greedy, greedy)))
    sampler = Sampler(SingleGroup(), [], CPU)
    rows = drawn(sampler, logits, plan)
    assert [row.tokens for row in rows] == [
        (best[0],),
        (best[1], best[2], best[3]),
        (best[4], best[5]),
    ]
    for row, first in zip(rows, (0, 1, 4), strict=True):
        for offset, (token, report) in enumerate(zip(row.tokens, row.logprobs, strict=True)):
            wanted = logits[first + offset].log_softmax(-1)
            assert report.token == token and report.logprob == pytest.approx(float(wanted.max()))


def test_padding_after_the_drafts_is_never_accepted():
    logits = torch.zeros(3, VOCAB)
    logits[:, 0] = 9.0
    (row,) = verify_rows(((0,),), (RowSampling(),))
    plan = StepPlan(verify=(replace(row, tokens=(1, 0, 0)),))
    sampler = Sampler(SingleGroup(), [], CPU)
    (result,) = drawn(sampler, logits, plan)
    assert result.tokens == (0, 0), "one draft and the token after it"


def test_rows_that_are_not_finite_keep_what_was_accepted_before():
    logits = torch.zeros(3, VOCAB)
    logits[0, 5], logits[1] = 9.0, float("nan")
    plan = StepPlan(verify=verify_rows(((5, 6),), (RowSampling(),)))
    sampler = Sampler(SingleGroup(), [], CPU)
    (result,) = drawn(sampler, logits, plan)
    assert (result.tokens, result.is_finite) == ((5,), False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_after_drafts_has_its_own_penalties(temperature):
    """Row j sees the drafts before it, as the row of plain decoding would."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(4, VOCAB, generator=generator) * 2
    params = SamplingParams(
        temperature=temperature,
        seed=3,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        min_tokens=3,
        max_tokens=9,
        stop_token_ids=(2,),
    )
    sampler = Sampler(SingleGroup(), [], CPU)

    def step(rows, tokens, drafts):
        fresh = Sequence("a", [9], params, max_model_len=64)
        for token in tokens:
            fresh.append(token)
        found, after = fresh.sampling_of(drafts)
        row = Row(
            "a",
            (1, *found),
            len(tokens),
            1,
            (1,),
            sampling=fresh.sampling(),
            num_drafts=len(found),
            after_drafts=after,
        )
        plan = StepPlan(verify=(row,))
        (result,) = drawn(sampler, rows, plan)
        return list(result.tokens)

    written = []
    for index in range(4):
        written += step(logits[index : index + 1], written, ())
    assert step(logits, [], written[:3]) == written


class Digits:
    """A toy grammar: tokens of a cycle, each allowed only after the one before it."""

    def __init__(self, cycle, vocab_size):
        self.cycle, self.vocab_size = cycle, vocab_size
        self.state, self.log = [0], []

    @property
    def next(self):
        return self.cycle[self.state[-1] % len(self.cycle)]

    def mask(self):
        bits = [0] * (-(-self.vocab_size // 8))
        for token in self.next:
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def allows(self, token):
        return token in self.next

    def advance(self, token):
        assert self.allows(token), "the engine walked a token that the mask bars"
        self.state.append(self.state[-1] + 1)

    def roll_back(self, count):
        del self.state[len(self.state) - count :]


@pytest.mark.parametrize("drafter", [None, "suffix", str(DRAFTER)])
def test_a_grammar_holds_inside_a_block(prompts, drafter):
    """Also when the first guess, or any later one, is not allowed; the matcher ends where the text
    does."""
    cycle = [{300, 301}, {310}, {320, 321, 322}]
    params = SamplingParams(temperature=1, seed=2, max_tokens=21, ignore_eos=True)
    with open_llm(drafter=drafter) as llm:
        matcher = Digits(cycle, llm.engine.limits.vocab_size)
        llm.engine.add_request("a", prompts[0], params, matcher)
        tokens = []
        while llm.engine.has_work:
            for output in llm.engine.step():
                tokens += output.token_ids
    assert len(tokens) == 21
    assert all(token in cycle[index % 3] for index, token in enumerate(tokens))
    assert len(matcher.state) == 1 + 21


def test_a_request_whose_guesses_fail_pauses():
    speculation = Speculation(DrafterProposer(4), max_drafts=4, verify_tokens=32, adaptive=True)
    state, length = DraftState(), 10
    for _ in range(16):
        assert speculation.propose([0] * length, state, 4) == (() if length == 10 else (1, 2, 3, 4))
        length += 1
        result = RowResult("a", (5,), drafts=(1, 2, 3, 4))
        speculation.record(state, result, num_tokens=length, drafted=4, served=1)
    assert speculation.propose([0] * length, state, 4) == ()
    assert speculation.propose([0] * (length + 64), state, 4) == (1, 2, 3, 4)


def test_more_requests_verify_fewer_guesses_each():
    speculation = Speculation(DrafterProposer(7), max_drafts=7, verify_tokens=64, adaptive=True)
    assert [speculation.limit(count) for count in (1, 8, 9, 16, 32, 64, 200)] == [
        7,
        7,
        3,
        3,
        1,
        0,
        0,
    ]
    assert speculation.wanted(16) == 3


def test_low_confidence_ends_a_block():
    proposer = DrafterProposer(4, min_confidence=0.5)
    latest = RowResult("a", (5,), drafts=(1, 2, 3, 4), confidence=(0.9, 0.6, 0.4, 0.9))
    assert proposer.propose([5], latest, 4) == (1, 2)
    assert proposer.propose([5], latest, 1) == (1,)
    assert proposer.propose([5], None, 4) == ()


def test_suffixes_are_whole_tokens():
    proposer = SuffixProposer()
    chance = random.Random(2)
    for _ in range(200):
        text = [chance.choice([1, 256, 65536, 2, 0]) for _ in range(chance.randint(2, 30))]
        found = proposer.propose(text, None, 3)
        naive = ()
        for count in range(min(6, len(text) - 1), 1, -1):
            starts = [s for s in range(len(text) - count) if text[s : s + count] == text[-count:]]
            if starts:
                naive = tuple(text[starts[-1] + count : starts[-1] + count + 3])
                break
        assert found == naive
