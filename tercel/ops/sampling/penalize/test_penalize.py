import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
    check_sequence,
)
from tercel.ops.sampling.penalize import CONTRACT, penalize
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = penalize.portable.name
TESTED = implementations(penalize)


def penalized(logits, *, count=0.0, seen=1.0, repetition=1.0, presence=0.0, frequency=0.0, bias=()):
    """One row of logits after penalties on token 1 and biases on the tokens named."""
    row = torch.tensor([logits])
    penalize(
        row,
        torch.tensor([0]),
        torch.tensor([1]),
        torch.tensor([count]),
        torch.tensor([seen]),
        torch.tensor([repetition]),
        torch.tensor([presence]),
        torch.tensor([frequency]),
        torch.zeros(len(bias), dtype=torch.int64),
        torch.tensor([token for token, _ in bias], dtype=torch.int64),
        torch.tensor([value for _, value in bias], dtype=torch.float32),
    )
    return row[0].tolist()


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, implementation):
    check_cell(penalize, cell, implementation)


@pytest.mark.parametrize("implementation", TESTED)
def test_sequence(implementation):
    check_sequence(penalize, CELL, implementation, steps=3)


def test_meta():
    check_meta(penalize, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(penalize, CELL, implementation)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"repetition": 2.0}, 2.0),
        ({"repetition": 2.0, "seen": 0.0}, 4.0),
        ({"presence": 0.5, "count": 3.0}, 3.5),
        ({"presence": 0.5}, 4.0),
        ({"frequency": 0.5, "count": 3.0}, 2.5),
        ({"repetition": 2.0, "frequency": 0.5, "presence": 0.25, "count": 2.0}, 0.75),
        ({"repetition": 2.0, "bias": [(1, 8.0)]}, 10.0),
    ],
    ids=str,
)
def test_each_penalty(settings, expected):
    assert penalized([3.0, 4.0, -1.0], **settings) == [3.0, expected, -1.0]


def test_repetition_lowers_a_negative_logit():
    assert penalized([3.0, -4.0, 1.0], repetition=2.0) == [3.0, -8.0, 1.0]


def test_bias_of_minus_infinity_bars_a_token():
    assert penalized([3.0, 4.0, 1.0], bias=[(2, float("-inf"))])[2] == float("-inf")


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(logits=a["logits"].bfloat16()),
        lambda a: a.update(tokens=a["tokens"][:-1]),
        lambda a: a.update(counts=a["counts"].long()),
        lambda a: a.update(repetition=a["repetition"][:-1]),
    ],
    ids=["bf16 logits", "a token less", "integer counts", "a row less"],
)
def test_refuses(change):
    check_refusal(penalize, CELL, PORTABLE, change)


def list_twice(prefix):
    def change(arguments):
        for name in ("rows", "tokens"):
            arguments[prefix + name][1] = arguments[prefix + name][0]

    return change


@pytest.mark.parametrize(
    "change",
    [
        list_twice(""),
        list_twice("bias_"),
        lambda a: a["tokens"].fill_(1280),
        lambda a: a["bias_rows"].fill_(-1),
        lambda a: a["repetition"].fill_(0.0),
    ],
    ids=["place twice", "bias twice", "token too large", "negative row", "repetition 0"],
)
def test_invalid_values(change):
    check_invalid(penalize, CELL, change)


def test_control_presence_without_an_occurrence():
    def broken(counts, seen, presence, **rest):
        penalize(counts=counts, seen=seen, presence=torch.zeros_like(presence), **rest)
        rest["logits"][rest["rows"], rest["tokens"]] -= presence[rest["rows"]] * seen

    check_control(penalize, CELL, broken)
