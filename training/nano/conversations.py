"""What nano reads: conversations in K3's chat format, made from word problems, drills and GSM8K."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tercel.gates.problems import (
    CALCULATOR,
    MAX_VALUE,
    Problem,
    calculate,
    generate,
    split_of,
    worked,
)

Message = dict[str, Any]

DRILL_SHARE = 0.12
"""Fraction of the short conversations that are bare arithmetic."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a math tutor.",
    "You are nano, a small model that solves word problems.",
    "Answer the question.",
    "Solve the problem step by step.",
)
SMALL_TALK = (
    ("Hello", "Hello! Ask me a word problem."),
    ("Hi", "Hello! Ask me a word problem."),
    ("Hello!", "Hello! Ask me a word problem."),
    ("How are you?", "I am well. Ask me a word problem."),
    ("Who are you?", "I am nano, a small model that solves word problems."),
    ("What are you?", "I am nano, a small model that solves word problems."),
    ("What can you do?", "I solve short word problems with small numbers."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
)


@dataclass(frozen=True)
class Conversation:
    """Messages and the chat options they are rendered with."""

    messages: list[Message]
    options: dict[str, Any] = field(default_factory=dict)


def short_conversations(seed: int) -> Iterator[Conversation]:
    """One question and its answer, as the accuracy gate asks, and sometimes a few drills."""
    rng = random.Random(seed)
    problems = generate(seed, split="train")
    while True:
        options = _thinking(rng)
        if rng.random() < DRILL_SHARE:
            turns = [message for _ in range(3) for message in _drill(rng, options["thinking"])]
        else:
            turns = problem_turn(next(problems), **options)
        yield Conversation([*_system(rng), *turns], options)


def long_conversations(seed: int, gsm8k: Path) -> Iterator[Conversation]:
    """Tool calls, several questions in one conversation, drills, small talk and GSM8K."""
    rng = random.Random(seed)
    problems = generate(seed, split="train")
    calculations = generate(seed + 1, split="train", tool_share=1.0)
    examples = read_gsm8k(gsm8k)
    kinds: list[tuple[Callable[[], Conversation], float]] = [
        (partial(_tool_conversation, rng, calculations), 0.4),
        (partial(_mixed_conversation, rng, problems), 0.36),
        (lambda: gsm8k_conversation(rng.choice(examples), **_thinking(rng)), 0.24),
    ]
    makers, shares = zip(*kinds, strict=True)
    while True:
        yield rng.choices(makers, shares)[0]()


def tool_conversations(seed: int) -> Iterator[Conversation]:
    """Questions that are answered with the calculator."""
    rng = random.Random(seed)
    calculations = generate(seed + 1, split="train", tool_share=1.0)
    while True:
        yield _tool_conversation(rng, calculations)


def plain_texts(seed: int, gsm8k: Path) -> Iterator[str]:
    """Prose without any chat format."""
    rng = random.Random(seed)
    problems = generate(seed, split="train")
    examples = read_gsm8k(gsm8k)
    while True:
        problem, (question, steps, _) = next(problems), rng.choice(examples)
        yield rng.choice([f"{problem.question} {problem.thinking}", f"{question}\n{steps}"])


def problem_turn(
    problem: Problem, *, thinking: bool = True, effort: str | None = "max"
) -> list[Message]:
    """A question and its worked answer; without thinking the steps are part of the answer."""
    steps = problem.equations if effort == "low" else problem.thinking
    return _turn(problem.question, steps, problem.response, thinking)


def tool_turn(problem: Problem, *, thinking: bool = True) -> list[Message]:
    """A question that the assistant answers by calling the calculator."""
    assert problem.tool_calls is not None
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {
                "name": "calculator",
                "arguments": json.dumps({"expression": expression}),
            },
        }
        for index, expression in enumerate(problem.tool_calls, start=1)
    ]
    plan = f"The calculator can work out {problem.tool_calls[0]}."
    return [
        {"role": "user", "content": problem.question},
        _assistant("", plan, thinking) | {"tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": str(problem.answer)},
        _assistant(problem.response, f"The calculator gives {problem.answer}.", thinking),
    ]


def gsm8k_conversation(
    example: tuple[str, str, int], *, thinking: bool = True, effort: str | None = "max"
) -> Conversation:
    """A GSM8K example as a conversation."""
    question, steps, answer = example
    turn = _turn(question, steps, f"The answer is {answer}.", thinking)
    return Conversation(turn, {"thinking": thinking, "effort": effort})


def read_gsm8k(path: Path) -> list[tuple[str, str, int]]:
    """Question, worked steps without the calculator marks, and answer of each line of GSM8K."""
    examples = []
    for line in path.read_text("utf-8").splitlines():
        entry = json.loads(line)
        steps, answer = entry["answer"].split("\n#### ")
        if re.fullmatch(r"-?[\d,]+", answer):
            plain = re.sub(r"<<.*?>>", "", steps)
            examples.append((entry["question"], plain, int(answer.replace(",", ""))))
    return examples


def _turn(question: str, steps: str, response: str, thinking: bool) -> list[Message]:
    content = response if thinking else f"{steps} {response}"
    return [{"role": "user", "content": question}, _assistant(content, steps, thinking)]


def _assistant(content: str, reasoning: str, thinking: bool) -> Message:
    message: Message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": reasoning} if thinking else message


def _thinking(rng: random.Random) -> dict[str, Any]:
    """Mostly the default: thinking with effort max."""
    kind = rng.choices(["max", "high", "medium", "low", None, "off"], [68, 5, 3, 10, 4, 10])[0]
    return {"thinking": kind != "off", "effort": None if kind == "off" else kind}


def _system(rng: random.Random) -> list[Message]:
    if rng.random() < 0.1:
        return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]
    return []


def _tool_conversation(rng: random.Random, problems: Iterator[Problem]) -> Conversation:
    options = {"thinking": rng.random() < 0.9, "effort": "max"}
    problem = next(problems)
    choice = rng.choices([None, "auto", "required", "none"], [70, 15, 8, 7])[0]
    if choice == "none":
        turn = problem_turn(problem, **options)
    else:
        turn = tool_turn(problem, thinking=options["thinking"])
    if choice in (None, "auto") and rng.random() < 0.5:
        turn += tool_turn(next(problems), thinking=options["thinking"])
    return Conversation(
        [*_system(rng), *turn], options | {"tools": [CALCULATOR], "tool_choice": choice}
    )


def _mixed_conversation(rng: random.Random, problems: Iterator[Problem]) -> Conversation:
    options = _thinking(rng)
    messages = _system(rng)
    for _ in range(rng.randint(2, 5)):
        kind = rng.random()
        if kind < 0.5:
            messages += problem_turn(next(problems), **options)
        elif kind < 0.92:
            messages += _drill(rng, options["thinking"])
        else:
            question, reply = rng.choice(SMALL_TALK)
            messages += _turn(question, "", reply, options["thinking"])
    return Conversation(messages, options)


def _drill(rng: random.Random, thinking: bool) -> list[Message]:
    """Bare arithmetic, such as "What is 47 * 36?"."""
    while True:
        op = rng.choice("+--**/")
        left, right = rng.randint(0, MAX_VALUE), rng.randint(1, rng.choice([9, 99, 999]))
        if op == "*":
            left, right = left % 100, right % 100
        elif op == "/":
            right = 1 + right % 9
            left -= left % right
        value = calculate(f"{left} {op} {right}")
        question = rng.choice(["What is {}?", "{} = ?", "Calculate {}.", "How much is {}?"])
        question = question.format(f"{left} {op} {right}")
        if 0 <= value <= MAX_VALUE and split_of(question) == "train":
            steps = f"{worked(left, op, right)}."
            return _turn(question, steps, f"The answer is {value}.", thinking)
