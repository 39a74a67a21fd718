import pytest
import torch

from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    draw,
)
from tercel.ops.attention.mla_decode import CONTRACT, mla_decode, portable
from tercel.ops.attention.mla_decode.reference import mla_decode as naive

CELL, _, SMALL = CONTRACT.cells


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    """All that lies past the rows' ends is NaN."""
    check_cell(mla_decode, cell, mla_decode.portable.name, dtype=dtype)


def test_replay():
    check_replay(mla_decode, SMALL, mla_decode.portable.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(width=3), "R*width"),
        (lambda a: a.update(block_table=a["block_table"].int()), "block_table"),
        (lambda a: a.update(context_lens=a["context_lens"][1:]), "axis R"),
        (lambda a: a.update(w_v=a["w_v"][1:]), "axis H"),
        (lambda a: a.update(pages=a["pages"][:, :, 1:].contiguous()), "axis E"),
    ],
    ids=["width", "int32 table", "a length too few", "a head too few", "entry"],
)
def test_refuses(change, words):
    assert words in str(check_refusal(mla_decode, SMALL, mla_decode.portable.name, change))


def test_validity_sees_a_context_past_the_table():
    a = draw(mla_decode, SMALL, dtype=torch.float32)
    a["context_lens"][1] += 8
    with pytest.raises(ValueError, match="block table holds 32"):
        CONTRACT.valid(**a)


def test_blocks_of_rows_are_the_whole(monkeypatch):
    a = draw(mla_decode, CELL, dtype=torch.float32)
    whole = mla_decode(**a)
    monkeypatch.setattr(portable, "WORKSPACE", 2 * 4 * 16 * 576)
    torch.testing.assert_close(mla_decode(**a), whole)


def test_width_is_that_many_single_steps():
    a = draw(mla_decode, SMALL, dtype=torch.float32)
    wide = mla_decode(**a).unflatten(0, (-1, 2))
    for draft in range(2):
        one = {
            "query": a["query"].unflatten(0, (-1, 2))[:, draft].contiguous(),
            "context_lens": a["context_lens"] + draft,
            "width": 1,
        }
        torch.testing.assert_close(mla_decode(**{**a, **one}), wide[:, draft])


def test_a_wider_table_changes_nothing():
    a = draw(mla_decode, SMALL, dtype=torch.float32)
    expected = mla_decode(**a)
    a["block_table"] = torch.nn.functional.pad(a["block_table"], (0, 5))
    torch.testing.assert_close(mla_decode(**a), expected)


def test_padding_rows_are_finite_and_change_no_other():
    a = draw(mla_decode, SMALL, dtype=torch.float32)
    expected = mla_decode(**a)
    a["pages"][0] = 0
    a["query"] = torch.cat((a["query"], a["query"][:4]))
    a["block_table"] = torch.nn.functional.pad(a["block_table"], (0, 0, 0, 2))
    a["context_lens"] = torch.nn.functional.pad(a["context_lens"], (0, 2))
    out = mla_decode(**a)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:6], expected)


def test_reads_nothing_on_the_host():
    check_meta(mla_decode, SMALL, mla_decode.portable.name)


def test_control_a_token_does_not_see_itself():
    def broken(*, context_lens, **a):
        return naive(**a, context_lens=(context_lens - 1).clamp(min=0))

    check_control(mla_decode, SMALL, broken)


def test_control_a_token_sees_the_next():
    def broken(*, context_lens, pages, **a):
        return naive(**a, pages=pages.nan_to_num(), context_lens=context_lens + 1)

    check_control(mla_decode, SMALL, broken)


def test_control_pages_in_another_order():
    def broken(*, block_table, **a):
        return naive(**a, block_table=block_table.roll(1, 0))

    check_control(mla_decode, CELL, broken)


def test_control_gate_of_another_head():
    def broken(*, gate, **a):
        return naive(**a, gate=gate.roll(128, -1))

    check_control(mla_decode, CELL, broken)


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_ordered(cell):
    check_cell(mla_decode, cell, "ordered", dtype=torch.float32)


def test_ordered_bits_do_not_depend_on_the_other_heads():
    a = draw(mla_decode, CELL, dtype=torch.float32)
    whole = mla_decode.using("ordered")(**a)
    heads = a["w_v"].shape[0]
    for first in range(heads):
        one = {
            "query": a["query"][:, first : first + 1].contiguous(),
            "w_v": a["w_v"][first : first + 1],
            "gate": a["gate"].chunk(heads, 1)[first].contiguous(),
        }
        part = mla_decode.using("ordered")(**{**a, **one})
        assert torch.equal(part, whole.chunk(heads, 1)[first])
