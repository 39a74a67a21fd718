"""Exact match on fresh word problems: what a trained checkpoint is measured by.

The problems are on the side of the question hash that training never draws from. Decoding is
greedy, a calculator call is executed and its result sent back, and only the final answer counts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from tercel.config import SamplingParams
from tercel.errors import ConfigError
from tercel.gates.problems import CALCULATOR, Problem, calculate, extract_answer, generate
from tercel.runtime.chat import AssistantMessage, ChatParser, collect, encode, render, start_channel
from tercel.runtime.completions import Completion
from tercel.runtime.tokenizer import Tokenizer

MAX_ROUNDS = 4
"""Answers per problem, tool calls included."""


class Generator(Protocol):
    """What the gate asks of tercel.runtime.llm.LLM."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]: ...


@dataclass(frozen=True)
class Graded:
    """One problem and what the model made of it."""

    problem: Problem
    response: str
    """Content of the last message."""
    num_tokens: int
    """Generated over all rounds."""

    @property
    def found(self) -> int | None:
        return extract_answer(self.response)

    @property
    def is_right(self) -> bool:
        return self.found == self.problem.answer


@dataclass(frozen=True)
class Score:
    """Right answers among problems of one kind."""

    num_right: int
    num_problems: int

    @classmethod
    def of(cls, graded: Sequence[Graded]) -> "Score":
        return cls(sum(each.is_right for each in graded), len(graded))

    @property
    def exact_match(self) -> float:
        return self.num_right / self.num_problems if self.num_problems else 0.0


@dataclass(frozen=True)
class Accuracy:
    """What the gate measures, by kind of problem."""

    trained: Sequence[Graded]
    """Fresh problems of the templates that training draws from."""
    held_out: Sequence[Graded]
    """Problems of templates that training never sees."""
    calculator: Sequence[Graded]
    """Fresh problems of trained templates, with the calculator declared."""

    @property
    def exact_match(self) -> float:
        """On trained templates."""
        return Score.of(self.trained).exact_match

    def scores(self) -> dict[str, Score]:
        """Every group by name; trained templates also by their number of steps."""
        steps = sorted({each.problem.steps for each in self.trained})
        by_steps = {
            f"{count} steps": [each for each in self.trained if each.problem.steps == count]
            for count in steps
        }
        groups = {
            "trained templates": self.trained,
            **by_steps,
            "held-out templates": self.held_out,
            "with calculator": self.calculator,
        }
        return {name: Score.of(graded) for name, graded in groups.items() if graded}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: one top-level `exact_match`, the scores, and every wrong answer."""
        everything = [*self.trained, *self.held_out, *self.calculator]
        return {
            "exact_match": self.exact_match,
            "scores": {
                name: {"exact_match": s.exact_match, "right": s.num_right, "of": s.num_problems}
                for name, s in self.scores().items()
            },
            "generated_tokens": sum(each.num_tokens for each in everything),
            "wrong": [
                {
                    "template": each.problem.template,
                    "question": each.problem.question,
                    "expected": each.problem.answer,
                    "found": each.found,
                    "response": each.response,
                }
                for each in everything
                if not each.is_right
            ],
        }


_WAVE = 4
"""Batches given to the engine at once, so that it rarely decodes less than a batch."""


def _silent(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class AccuracyGate:
    """How many problems of each kind to ask, and how."""

    problems: int = 500
    """Problems of trained templates."""
    held_out: int = 100
    """Problems of held-out templates."""
    calculator: int = 100
    """Problems of trained templates with the calculator declared."""
    seed: int = 0
    """Of the problems."""
    batch: int = 16
    """Requests decoded together."""
    max_tokens: int = 512
    """Tokens of one answer at most."""

    def __post_init__(self) -> None:
        for name, least in (("problems", 1), ("held_out", 0), ("calculator", 0), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")

    def run(self, llm: Generator, report: Callable[[int, int], None] = _silent) -> Accuracy:
        """Asks every problem; `report(done, total)` after each batch."""
        seed = self.seed
        trained = islice(generate(seed), self.problems)
        held_out = islice(generate(seed, held_out=True), self.held_out)
        # Another seed, so that these are not the trained problems once more.
        calculator = islice(generate(seed + 1, tool_share=1.0), self.calculator)
        done, total = 0, self.problems + self.held_out + self.calculator
        groups = []
        for problems in (list(trained), list(held_out), list(calculator)):
            graded: list[Graded] = []
            for start in range(0, len(problems), _WAVE * self.batch):
                graded += self._grade(llm, problems[start : start + _WAVE * self.batch])
                report(done + len(graded), total)
            done += len(graded)
            groups.append(graded)
        return Accuracy(*groups)

    def _grade(self, llm: Generator, problems: Sequence[Problem]) -> list[Graded]:
        conversations = [_Conversation(problem) for problem in problems]
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens)
        for _ in range(MAX_ROUNDS):
            waiting = [each for each in conversations if each.is_open]
            if waiting:
                segments = [each.prompt() for each in waiting]
                prompts = [encode(llm.tokenizer, each) for each in segments]
                answers = llm.generate(prompts, params)
                for each, prompt, answer in zip(waiting, segments, answers, strict=True):
                    parser = ChatParser(llm.tokenizer, start=start_channel(prompt))
                    events = parser.push(answer.token_ids) + parser.finish()
                    each.add(collect(events), answer.completion_tokens)
        return [Graded(each.problem, each.response, each.num_tokens) for each in conversations]


class _Conversation:
    """A problem's messages so far; open until the model answers without a tool call."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.response = ""
        self.num_tokens = 0
        self.is_open = True
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
        self._tools = None if problem.tool_calls is None else [CALCULATOR]

    def prompt(self) -> Any:
        return render(self._messages, tools=self._tools)

    def add(self, message: AssistantMessage, num_tokens: int) -> None:
        """The model's next message; the results of its calls follow it."""
        self.response = message.content
        self.num_tokens += num_tokens
        self.is_open = bool(message.tool_calls)
        self._messages.append(message.to_message())
        for call in message.tool_calls:
            result = _calculator(call.name, call.arguments)
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _calculator(name: str, arguments: str) -> str:
    """The result that the model reads; what is wrong with its call is a result too."""
    if name != CALCULATOR["function"]["name"]:
        return f"{name} is unknown"
    try:
        expression = json.loads(arguments)["expression"]
        return str(calculate(str(expression)))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
