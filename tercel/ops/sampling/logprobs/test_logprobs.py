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
from tercel.ops.sampling.logprobs.contract import KINDS
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = logprobs.portable.name
TESTED = implementations(logprobs)
FEW = Cell("several parts, the last not whole", S=2, V=700, top=3)
MANY = Cell("groups of several tiles", S=1, V=163840, top=64)
HARD = {kind: Cell(kind, S=1, V=1500, top=20, kind=kind) for kind in KINDS}
CALLS = [
    *(pytest.param(cell, PORTABLE, id=f"{PORTABLE}-{cell}") for cell in CONTRACT.cells),
    *(
        pytest.param(*(cell, *kernel.values), marks=kernel.marks, id=f"triton-{cell}")
        for kernel in TESTED[1:]
        for cell in (CONTRACT.cells[0], CONTRACT.cells[2], FEW, MANY, *HARD.values())
    ),
]


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
@pytest.mark.parametrize("top", [64, 65])
def test_more_tokens_than_groups(implementation, top):
    check_cell(logprobs, Cell("", S=1, V=100, top=top), implementation)


@pytest.mark.parametrize("implementation", TESTED)
def test_zeros_of_both_signs_are_equal(implementation):
    logits = torch.full((1, 300), -1.0)
    logits[0, [3, 100, 250]] = torch.tensor([-0.0, 0.0, -0.0])
    *_, ids, rank = logprobs.using(implementation)(logits, torch.tensor([250]), top=3)
    assert ids.tolist() == [[3, 100, 250]] and rank.tolist() == [1]


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


def test_control_ties_to_the_higher_id():
    def broken(logits, tokens, *, top):
        chosen, values, ids, rank = logprobs(logits.flip(1), logits.shape[1] - 1 - tokens, top=top)
        return chosen, values, logits.shape[1] - 1 - ids, rank

    check_control(logprobs, HARD["rounded"], broken)


def test_control_one_token_of_each_group():
    def broken(logits, tokens, *, top):
        best = logits.unflatten(1, (-1, 50)).amax(2, keepdim=True)
        held = torch.where(logits.unflatten(1, (-1, 50)) == best, best, float("-inf"))
        _, _, ids, _ = logprobs(held.flatten(1), tokens, top=top)
        chosen, _, _, rank = logprobs(logits, tokens, top=0)
        return chosen, logits.log_softmax(1).gather(1, ids), ids, rank

    check_control(logprobs, HARD["together"], broken)
