import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_invalid,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
)
from tercel.contract.draw import draw
from tercel.ops.norm.embed_rms_norm import CONTRACT, embed_rms_norm
from tests.interpreter import implementations

CELL = CONTRACT.cells[1]
PORTABLE = embed_rms_norm.portable.name
TESTED = implementations(embed_rms_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
@pytest.mark.parametrize("implementation", TESTED)
def test_cells(cell, dtype, implementation):
    check_cell(embed_rms_norm, cell, implementation, dtype=dtype)


@pytest.mark.parametrize("implementation", TESTED)
def test_roundings(implementation):
    check_roundings(embed_rms_norm, CELL, implementation)


def test_meta():
    check_meta(embed_rms_norm, CELL, PORTABLE)


@pytest.mark.parametrize("implementation", TESTED)
def test_replay(implementation):
    check_replay(embed_rms_norm, CELL, implementation)


def test_snapshot_is_the_embedding_bit_for_bit():
    arguments = draw(embed_rms_norm, CELL, dtype=torch.bfloat16)
    _, embedding = embed_rms_norm(**arguments)
    assert torch.equal(arguments["snapshot"], embedding)
    assert embedding.data_ptr() != arguments["snapshot"].data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(tokens=a["tokens"].int()),
        lambda a: a.update(weight=a["weight"][:-1]),
        lambda a: a.update(snapshot=a["snapshot"][:-1]),
        lambda a: a.update(table=a["table"].bfloat16()),
    ],
    ids=["i32 tokens", "weight too short", "snapshot too short", "table of another dtype"],
)
def test_refuses(change):
    check_refusal(embed_rms_norm, CELL, PORTABLE, change)


@pytest.mark.parametrize("token", [-1, 1280])
def test_id_outside_the_table_is_invalid(token):
    check_invalid(embed_rms_norm, CELL, lambda a: a["tokens"].fill_(token))


def test_control_snapshot_of_the_normed_row():
    def broken(tokens, table, weight, snapshot, *, eps):
        embedding = table[tokens]
        normed = torch.rms_norm(embedding, weight.shape, weight, eps)
        snapshot.copy_(normed)
        return normed, embedding

    check_control(embed_rms_norm, CELL, broken)
