import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
)
from tercel.contract.draw import draw
from tercel.ops.gemm.embedding import CONTRACT, embedding
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = embedding.portable.name
TESTED = implementations(embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(embedding, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_roundings(implementation):
    check_roundings(embedding, CELL, implementation)


def test_meta():
    check_meta(embedding, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(embedding, CELL, implementation)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_add_up_to_the_whole_table(ranks):
    arguments = draw(embedding, CELL, dtype=torch.bfloat16)
    tokens, table = arguments["tokens"] % len(arguments["table"]), arguments["table"]
    size = len(table) // ranks
    parts = [
        embedding(tokens, part, first_id=size * rank) for rank, part in enumerate(table.split(size))
    ]
    assert torch.equal(sum(parts), table[tokens])


def test_a_row_that_is_not_finite_stays_with_its_token():
    table = torch.ones(4, 8)
    table[0] = torch.nan
    rows = embedding(torch.tensor([9, 3, 5]), table, first_id=2)
    assert rows.isfinite().all() and rows[2].eq(1).all() and rows[0].eq(0).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(tokens=a["tokens"].int()),
        lambda a: a.update(table=a["table"].t()),
        lambda a: a.update(first_id=-1),
    ],
    ids=["i32 tokens", "table not contiguous", "negative first id"],
)
def test_refuses(change):
    check_refusal(embedding, CELL, PORTABLE, change)


def test_control_ids_of_other_ranks_wrap_around():
    def broken(tokens, table, *, first_id):
        return table[(tokens - first_id) % len(table)]

    check_control(embedding, CELL, broken)
