"""The word problems: their arithmetic, their split, and that a seed is all they depend on."""

import re
from itertools import islice

import pytest

from tercel.gates.problems import (
    EVALUATION_SHARE,
    MAX_VALUE,
    calculate,
    catalogue,
    extract_answer,
    generate,
    question_hash,
    split_of,
    worked,
)


def test_catalogue_has_enough_stories_of_two_to_four_steps() -> None:
    templates = catalogue().templates
    assert sum(not template.held_out for template in templates) >= 40
    assert sum(template.held_out for template in templates) >= 8
    assert {len(template.steps) for template in templates} == {2, 3, 4}
    assert len({template.name for template in templates}) == len(templates)
    assert max(high for template in templates for _, high in template.numbers.values()) <= 99


@pytest.mark.parametrize("held_out", [False, True])
def test_every_equation_of_every_story_holds(held_out: bool) -> None:
    problems = list(islice(generate(1, held_out=held_out, tool_share=0.5), 600))
    names = {template.name for template in catalogue().templates if template.held_out == held_out}
    composed = set() if held_out else {"story_2", "story_3", "story_4"}
    assert {problem.template for problem in problems} == names | composed
    for problem in problems:
        chains = problem.equations.removesuffix(".").split(". ")
        assert len(chains) == problem.steps
        assert all(chain in problem.thinking for chain in chains)
        values = [{calculate(part) for part in chain.split(" = ")} for chain in chains]
        assert all(len(value) == 1 and 0 <= min(value) <= MAX_VALUE for value in values)
        assert values[-1] == {problem.answer}
        assert "{" not in problem.question + problem.thinking
        if problem.tool_calls is not None:
            assert [calculate(call) for call in problem.tool_calls] == [problem.answer]


def test_tool_share_is_the_fraction_solved_with_the_calculator() -> None:
    problems = list(islice(generate(2, tool_share=0.25), 2000))
    assert 0.2 < sum(problem.tool_calls is not None for problem in problems) / 2000 < 0.3
    assert all(problem.tool_calls is None for problem in islice(generate(2), 50))


def test_training_and_evaluation_never_share_a_question() -> None:
    train = {problem.question for problem in islice(generate(3, split="train"), 3000)}
    evaluation = {problem.question for problem in islice(generate(3, split="evaluation"), 500)}
    assert not train & evaluation
    assert all(question_hash(question) % EVALUATION_SHARE for question in train)
    assert {split_of(question) for question in evaluation} == {"evaluation"}


def test_a_seed_fixes_the_problems() -> None:
    first, again, other = (list(islice(generate(seed), 20)) for seed in (7, 7, 8))
    assert first == again != other


def test_question_hash_is_stable_across_processes_and_versions() -> None:
    assert question_hash("How many?") == 0x4EE3440153A6E7DC


@pytest.mark.parametrize(
    "arguments, chain",
    [
        ((6, "*", 7), "6 * 7 = 42"),
        ((47, "*", 6), "47 * 6 = 240 + 42 = 282"),
        ((405, "*", 3), "405 * 3 = 1200 + 15 = 1215"),
        ((123, "*", 4), "123 * 4 = 400 + 80 + 12 = 480 + 12 = 492"),
        ((47, "*", 36), "47 * 36 = 47 * 30 + 47 * 6 = 1410 + 282 = 1692"),
        ((20, "*", 68), "20 * 68 = 1360"),
        ((252, "/", 6), "252 / 6 = 240 / 6 + 12 / 6 = 40 + 2 = 42"),
        ((0, "*", 5), "0 * 5 = 0"),
        ((0, "/", 5), "0 / 5 = 0"),
        ((98, "-", 9), "98 - 9 = 89"),
    ],
)
def test_worked_arithmetic(arguments: tuple[int, str, int], chain: str) -> None:
    assert worked(*arguments) == chain


@pytest.mark.parametrize(
    "text, answer",
    [
        ("The answer is 42.", 42),
        ("2 + 2 = 4. The answer is 1,234. Ask 5 more.", 1234),
        ("the answer is: $7", 7),
        ("The answer is -3", -3),
        ("That makes 12 and 30", 30),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("expression", ["", "7 / 2", "1 / 0", "a + 1", "2 ** 9", "f(1)", "1.5 + 1"])
def test_calculator_refuses_what_is_not_integer_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError):
        calculate(expression)


def test_calculator_binds_as_arithmetic_does() -> None:
    assert calculate("(43 + 5) / 6 * 9 - 2") == 70
    assert re.fullmatch(r"\d+", str(calculate(" 3 * (2 + 1) ")))
