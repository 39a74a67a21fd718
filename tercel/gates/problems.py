"""Word problems with worked steps: what nano is trained on and what the accuracy gate asks.

The stories are data (problems.toml): whole templates, and fragments that are composed. A problem is
drawn from a seed alone, and a stable hash of its question decides whether training or evaluation
may use it, so the two never meet whatever their seeds.
"""

import ast
import hashlib
import operator
import random
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

MAX_VALUE = 1999
"""No intermediate value is larger, so that a small model can learn the arithmetic."""

EVALUATION_SHARE = 16
"""One question in this many is kept for evaluation."""

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
"""The tool that problems with `tool_calls` declare, as a chat request spells it."""

STORY_SHARE = 0.25
"""Fraction of the problems of trained templates that are composed."""

Split = Literal["train", "evaluation"]
Range = tuple[int, int]

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
_AST_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@dataclass(frozen=True)
class Problem:
    """One word problem and its solution."""

    question: str
    thinking: str
    """The worked steps in sentences."""
    equations: str
    """The worked steps as arithmetic alone."""
    answer: int
    template: str
    steps: int
    tool_calls: tuple[str, ...] | None
    """Calculator expressions that solve it, where the problem is to be solved with the tool."""

    @property
    def response(self) -> str:
        """The final answer as the model words it."""
        return f"The answer is {self.answer}."


@dataclass(frozen=True)
class Step:
    """`target = left op right`, told by `sentence`, whose `{}` takes the worked arithmetic."""

    target: str
    left: str
    op: str
    right: str
    sentence: str

    @classmethod
    def parse(cls, text: str) -> "Step":
        """Read `target = left op right | sentence`."""
        equation, sentence = text.split(" | ")
        target, _, left, op, right = equation.split()
        return cls(target, left, op, right, sentence)


@dataclass(frozen=True)
class Template:
    """One story: phrasings of the question, number ranges, and the steps to the answer."""

    name: str
    questions: tuple[str, ...]
    numbers: dict[str, Range]
    steps: tuple[Step, ...]
    held_out: bool = False


@dataclass(frozen=True)
class Fragment:
    """A part of a composed story: where it has an `op`, the running number meets {x}."""

    told: str
    first: Range | None = None
    """Range of {a}, in an opening."""
    op: str | None = None
    other: Range = (0, 0)
    """Range of {x}."""
    sentence: str = ""

    @classmethod
    def parse(cls, text: str, ranges: dict[str, Range]) -> "Fragment":
        """Read `[first] [op other] | told | sentence`, of which only `told` is always there."""
        if "|" not in text:
            return cls(text)
        head, told, *sentence = text.split(" | ")
        *first, op, other = head.split() if sentence else [head, "", ""]
        return cls(
            told,
            ranges[first[0]] if first else None,
            op or None,
            ranges.get(other, (0, 0)),
            "".join(sentence),
        )


@dataclass(frozen=True)
class Catalogue:
    """Every template, the fragments of composed stories, and the pools of words that fill them."""

    templates: tuple[Template, ...]
    openings: tuple[Fragment, ...]
    events: tuple[Fragment, ...]
    closings: tuple[Fragment, ...]
    pools: dict[str, tuple[str, ...]]


@cache
def catalogue() -> Catalogue:
    """What problems.toml holds."""
    data = tomllib.loads(files(__package__).joinpath("problems.toml").read_text("utf-8"))
    ranges = {name: (low, high) for name, (low, high) in data["ranges"].items()}
    templates = tuple(
        Template(
            name=entry["name"],
            questions=tuple(entry["questions"]),
            numbers={slot: ranges[name] for slot, name in entry["numbers"].items()},
            steps=tuple(Step.parse(step) for step in entry["steps"]),
            held_out=entry.get("held_out", False),
        )
        for entry in data["template"]
    )
    fragments = {
        kind: tuple(Fragment.parse(text, ranges) for text in texts)
        for kind, texts in data["story"].items()
    }
    pools = {name: tuple(words) for name, words in data["pools"].items()}
    return Catalogue(templates, **fragments, pools=pools)


def generate(
    seed: int, *, split: Split = "evaluation", held_out: bool = False, tool_share: float = 0.0
) -> Iterator[Problem]:
    """Endless problems, the same for the same arguments.

    Args:
        seed: any integer.
        split: which side of the question hash to draw from.
        held_out: draw from the templates that training never sees, else from the trained ones.
        tool_share: fraction of problems that are to be solved with the calculator.
    """
    rng = random.Random(seed)
    known = catalogue()
    templates = [template for template in known.templates if template.held_out is held_out]
    while True:
        # The template is kept until a draw fits, so that hard-to-fit stories are as frequent.
        is_story = not held_out and rng.random() < STORY_SHARE
        template = _compose(rng, known) if is_story else rng.choice(templates)
        tool = rng.random() < tool_share
        problem = None
        while problem is None or split_of(problem.question) != split:
            problem = _draw(rng, template, known.pools, tool)
        yield problem


def split_of(question: str) -> Split:
    """The side a question is on: a function of its text alone."""
    return "evaluation" if question_hash(question) % EVALUATION_SHARE == 0 else "train"


def question_hash(question: str) -> int:
    """A 64-bit hash of the question that is the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big")


def extract_answer(text: str) -> int | None:
    """The integer after the last "answer is", else the last integer of the text, else None."""
    number = r"(-?\d[\d,]*)"
    found = re.findall(rf"answer is:?\s*\$?{number}", text, re.IGNORECASE)
    found = found or re.findall(number, text)
    return int(found[-1].replace(",", "")) if found else None


def calculate(expression: str) -> int:
    """The value of an integer expression of + - * / and (), as the calculator tool returns it.

    Raises:
        ValueError: anything else in the expression, or a division with a remainder.
    """

    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _AST_OPERATORS:
                return _apply(value(left), _AST_OPERATORS[type(op)], value(right))
        raise ValueError(
            f"calculator: cannot evaluate {expression!r}; use integers, + - * / and ()"
        )

    try:
        return value(ast.parse(expression.strip(), mode="eval"))
    except SyntaxError as error:
        raise ValueError(f"calculator: {expression!r} is not an expression") from error


def worked(left: int, op: str, right: int) -> str:
    """`left op right` as a chain of equal expressions, each one digit-sized step from the last."""
    chain = [f"{left} {op} {right}"]
    if op == "*":
        chain += _partial_products(left, right)
    elif op == "/":
        chain += _partial_quotients(left, right)
    chain.append(str(_apply(left, op, right)))
    return " = ".join(chain)


def _draw(
    rng: random.Random, template: Template, pools: dict[str, tuple[str, ...]], tool: bool
) -> Problem | None:
    """One problem of a template, or None where the numbers drawn do not work out."""
    numbers = {slot: rng.randint(low, high) for slot, (low, high) in template.numbers.items()}
    values = dict(numbers)
    for step in template.steps:
        left, right = _operand(step.left, values), _operand(step.right, values)
        if step.op == "/" and left % right:
            return None
        values[step.target] = _apply(left, step.op, right)
        if not 0 <= values[step.target] <= MAX_VALUE:
            return None
    words = _words(rng, pools)
    arithmetic = [
        worked(_operand(step.left, values), step.op, _operand(step.right, values))
        for step in template.steps
    ]
    sentences = [
        step.sentence.replace("{}", chain).format(**words)
        for step, chain in zip(template.steps, arithmetic, strict=True)
    ]
    return Problem(
        question=rng.choice(template.questions).format(**words, **numbers),
        thinking=" ".join(sentences),
        equations=". ".join(arithmetic) + ".",
        answer=values[template.steps[-1].target],
        template=template.name,
        steps=len(template.steps),
        tool_calls=(_expression(template.steps, numbers),) if tool else None,
    )


def _compose(rng: random.Random, known: Catalogue) -> Template:
    """A story of two to four steps: an opening, events and a closing on one running number."""
    ends = [rng.choice(known.openings), rng.choice(known.closings)]
    wanted = rng.randint(2, 4) - sum(fragment.op is not None for fragment in ends)
    events = [rng.choice(known.events) for _ in range(wanted)]
    numbers = {"a": ends[0].first or (0, 0)}
    told, steps, running = [], [], "a"
    for index, fragment in enumerate([ends[0], *events, ends[1]]):
        told.append(fragment.told.replace("{x}", f"{{x{index}}}"))
        if fragment.op is not None:
            numbers[f"x{index}"] = fragment.other
            step = Step(f"v{index}", running, fragment.op, f"x{index}", fragment.sentence)
            steps.append(step)
            running = step.target
    return Template(f"story_{len(steps)}", (" ".join(told),), numbers, tuple(steps))


def _words(rng: random.Random, pools: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Two different people, two different kinds of things, and a place."""
    name, friend = rng.sample(pools["name"], 2)
    things, goods = rng.sample(pools["things"], 2)
    place = rng.choice(pools["place"])
    return {"name": name, "friend": friend, "things": things, "goods": goods, "place": place}


def _operand(term: str, values: dict[str, int]) -> int:
    return int(term) if term.isdigit() else values[term]


def _apply(left: int, op: str, right: int) -> int:
    if op == "/" and (right == 0 or left % right):
        raise ValueError(f"{left} / {right} is not an integer")
    return _OPERATORS[op](left, right)


def _partial_products(left: int, right: int) -> list[str]:
    """47 * 6 -> 240 + 42; 47 * 36 -> 47 * 30 + 47 * 6, 1410 + 282."""
    small, large = sorted((left, right))
    if small < 10:
        terms = [small * part for part in _place_values(large)]
        chain: list[str] = []
    else:
        parts = _place_values(small)
        terms = [large * part for part in parts]
        chain = [" + ".join(f"{large} * {part}" for part in parts)]
    if len(terms) < 2:
        return []
    while len(terms) > 1:
        chain.append(" + ".join(map(str, terms)))
        terms = [terms[0] + terms[1], *terms[2:]]
    return chain


def _partial_quotients(dividend: int, divisor: int) -> list[str]:
    """252 / 6 -> 240 / 6 + 12 / 6, 40 + 2."""
    parts = _place_values(dividend // divisor)
    if len(parts) < 2:
        return []
    return [
        " + ".join(f"{part * divisor} / {divisor}" for part in parts),
        " + ".join(map(str, parts)),
    ]


def _place_values(number: int) -> list[int]:
    """The non-zero digits with their places: 405 -> [400, 5]."""
    digits = str(number)
    places = [int(digit) * 10 ** (len(digits) - 1 - i) for i, digit in enumerate(digits)]
    return [place for place in places if place]


def _expression(steps: tuple[Step, ...], numbers: dict[str, int]) -> str:
    """The steps as one expression, with only the parentheses that it needs."""
    known = {slot: (str(value), 3) for slot, value in numbers.items()}
    binding = {"+": 1, "-": 1, "*": 2, "/": 2}

    def term(name: str, at_least: int) -> str:
        text, bound = known.get(name, (name, 3))
        return text if bound >= at_least else f"({text})"

    for step in steps:
        bound = binding[step.op]
        left, right = term(step.left, bound), term(step.right, bound + 1)
        known[step.target] = (f"{left} {step.op} {right}", bound)
    return known[steps[-1].target][0]
