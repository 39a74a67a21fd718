import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
)
from tercel.ops.sampling.logprobs import CONTRACT, logprobs

CELL = CONTRACT.cells[1]
PORTABLE = logprobs.portable.name


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell):
    check_cell(logprobs, cell, PORTABLE)


def test_meta():
    check_meta(logprobs, CELL, PORTABLE)


def test_replay():
    check_replay(logprobs, CELL, PORTABLE)


def test_probabilities_of_a_known_row():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    chosen, values, ids, rank = logprobs(logits, torch.tensor([3]), top=4)
    assert chosen.exp().tolist() == pytest.approx([0.125])
    assert values.exp().tolist()[0] == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert rank.tolist() == [3]


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
