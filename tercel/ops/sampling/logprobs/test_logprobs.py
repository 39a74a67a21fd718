import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
)
from tercel.ops.sampling.logprobs import CONTRACT, logprobs
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = logprobs.portable.name
TESTED = implementations(logprobs)
FEW = Cell("several parts, few likeliest tokens", S=2, V=2500, top=3)
CALLS = [
    *(pytest.param(cell, PORTABLE, id=f"{PORTABLE}-{cell}") for cell in CONTRACT.cells),
    *(
        pytest.param(*(cell, *kernel.values), marks=kernel.marks, id=f"triton-{cell}")
        for kernel in TESTED[1:]
        for cell in (CONTRACT.cells[0], CONTRACT.cells[2], FEW)
    ),
]
"""Interpreted, sorting a part takes seconds."""


@pytest.mark.parametrize(("cell", "implementation"), CALLS)
def test_cells(cell, implementation):
    check_cell(logprobs, cell, implementation)


def test_meta():
    check_meta(logprobs, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(logprobs, FEW, implementation)


def test_probabilities_of_a_known_row():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    chosen, values, ids, rank = logprobs(logits, torch.tensor([3]), top=4)
    assert chosen.exp().tolist() == pytest.approx([0.125])
    assert values.exp().tolist()[0] == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert rank.tolist() == [3]


@pytest.mark.parametrize("implementation", TESTED)
def test_ties_and_barred_tokens(implementation):
    logits = torch.full((1, 300), float("-inf"))
    logits[0, [250, 7, 120]] = torch.tensor([2.0, 1.0, 2.0])
    chosen, values, ids, rank = logprobs.using(implementation)(logits, torch.tensor([7]), top=4)
    assert ids.tolist() == [[120, 250, 7, 0]] and rank.tolist() == [3]
    assert values[0, 2] == chosen[0] and values[0, 3] == float("-inf")


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(logits=a["logits"].bfloat16()),
        lambda a: a.update(tokens=a["tokens"][:-1]),
        lambda a: a.update(top=1281),
        lambda a: a.update(top=-1),
    ],
    ids=["bf16 logits", "a row less", "more than there are", "negative"],
)
def test_refuses(change):
    check_refusal(logprobs, CELL, PORTABLE, change)


def test_token_outside_the_vocabulary_is_invalid():
    check_invalid(logprobs, CELL, lambda a: a["tokens"].fill_(1280))


def test_control_rank_from_zero():
    def broken(logits, tokens, *, top):
        *values, rank = logprobs(logits, tokens, top=top)
        return *values, rank - 1

    check_control(logprobs, CELL, broken)
