"""The accuracy gate, asked with a model that knows what it is supposed to know."""

import json
from itertools import islice

import pytest

from tercel.gates.accuracy import AccuracyGate
from tercel.gates.problems import CALCULATOR, Problem, generate, split_of
from tercel.runtime.chat import Segment, encode
from tercel.runtime.chat.segments import END_OF_MESSAGE, close_tag, open_tag, text
from tercel.runtime.completions import Completion
from tercel.runtime.tokenizer import Tokenizer, byte_tokens

GATE = AccuracyGate(problems=20, held_out=10, calculator=10, seed=3, batch=2)


def answer(response: str, call: str | None = None) -> list[Segment]:
    """An assistant's output behind its generation prompt."""
    segments = [*text("so"), *close_tag("think"), *open_tag("response"), *text(response)]
    segments += close_tag("response")
    if call is not None:
        segments += [*open_tag("tools"), *open_tag("call", ("tool", "calculator"), ("index", "1"))]
        segments += open_tag("argument", ("key", "expression"), ("type", "string"))
        segments += [*text(call), *close_tag("argument"), *close_tag("call"), *close_tag("tools")]
    return [*segments, *close_tag("message"), END_OF_MESSAGE]


class Pupil:
    """Solves the problems it knows; wrong about every `wrong_every`-th answer it gives."""

    def __init__(self, *, wrong_every=0, calls="expression"):
        self.tokenizer = Tokenizer(byte_tokens())
        known = [
            *islice(generate(GATE.seed), GATE.problems),
            *islice(generate(GATE.seed, held_out=True), GATE.held_out),
            *islice(generate(GATE.seed + 1, tool_share=1.0), GATE.calculator),
        ]
        self.known = {problem.question: problem for problem in known}
        self.wrong_every = wrong_every
        self.calls = calls
        self.num_answers = 0
        self.batches = []
        self.questions = []

    def generate(self, prompts, params):
        assert params.greedy
        self.batches.append(len(prompts))
        return [self._complete(self.tokenizer.decode(prompt)) for prompt in prompts]

    def _complete(self, prompt: str) -> Completion:
        problem = next(p for question, p in self.known.items() if question in prompt)
        self.questions.append(problem.question)
        ids = tuple(encode(self.tokenizer, self._reply(problem, prompt)))
        return Completion("", ids, (), "stop", None, None, len(prompt), len(ids))

    def _reply(self, problem: Problem, prompt: str) -> list[Segment]:
        _, has_result, rest = prompt.rpartition('role="tool"')
        result = rest.partition("<|sep|>")[2].partition("<|")[0] if has_result else ""
        if problem.tool_calls is not None and not has_result:
            return answer("", problem.tool_calls[0] if self.calls == "expression" else self.calls)
        self.num_answers += 1
        if self.wrong_every and self.num_answers % self.wrong_every == 0:
            return answer(f"The answer is {problem.answer + 1}.")
        return answer(f"The answer is {result or problem.answer}.")


def test_a_perfect_pupil():
    pupil, seen = Pupil(), []
    measured = GATE.run(pupil, lambda done, total: seen.append((done, total)))
    assert measured.exact_match == 1.0
    scores = measured.scores()
    assert {"trained templates", "held-out templates", "with calculator"} < set(scores)
    assert all(score.exact_match == 1.0 for score in scores.values())
    by_steps = [score for name, score in scores.items() if name.endswith("steps")]
    assert sum(score.num_problems for score in by_steps) == GATE.problems
    assert seen[-1] == (40, 40)
    assert max(pupil.batches) == 8
    assert all(split_of(question) == "evaluation" for question in pupil.questions)


def test_wrong_answers_count_and_are_listed():
    measured = GATE.run(Pupil(wrong_every=4))
    assert measured.exact_match == 0.75
    result = json.loads(json.dumps(measured.to_dict()))
    assert result["exact_match"] == 0.75
    assert len(result["wrong"]) == 10
    wrong = result["wrong"][0]
    assert wrong["found"] == wrong["expected"] + 1


def test_calculator_results_reach_the_model():
    measured = GATE.run(Pupil(calls="1 + 1"))
    assert {each.found for each in measured.calculator} == {2}
    assert measured.exact_match == 1.0


@pytest.mark.parametrize("call", ["import os", "7 / 2", "1 +"])
def test_a_bad_call_is_a_result_too(call):
    measured = GATE.run(Pupil(calls=call))
    assert all("error: " in each.response for each in measured.calculator)


def test_the_same_seed_asks_the_same_problems():
    first, again = Pupil(), Pupil()
    GATE.run(first)
    GATE.run(again)
    assert first.questions == again.questions
    assert CALCULATOR["function"]["name"] == "calculator"
