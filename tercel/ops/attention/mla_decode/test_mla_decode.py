import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import check_cell, check_control, check_meta, check_refusal, check_replay
from tercel.contract.draw import draw
from tercel.ops.attention.mla_decode import CONTRACT, mla_decode, portable
from tercel.ops.attention.mla_decode.reference import mla_decode as naive
from tests.interpreter import INTERPRETED, REASON
from tests.poison import poisoned_memory

CELL, DRAFTS, ENDS, CODED_ENDS, SMALL, FP8, *MANY = CONTRACT.cells
PORTABLE = mla_decode.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    """All that lies past the rows' ends is NaN."""
    check_cell(mla_decode, cell, PORTABLE, dtype=dtype)


def test_replay():
    check_replay(mla_decode, SMALL, PORTABLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(width=3), "R*width"),
        (lambda a: a.update(block_table=a["block_table"].int()), "block_table"),
        (lambda a: a.update(context_lens=a["context_lens"][1:]), "axis R"),
        (lambda a: a.update(w_v=a["w_v"][1:]), "axis H"),
        (lambda a: a.update(pages=a["pages"][:, :, 1:].contiguous()), "axis E"),
        (lambda a: a.update(pages=a["pages"].to(torch.float8_e4m3fn)), "page_scale is None"),
        (lambda a: a.update(page_scale=torch.ones(1)), "page_scale is None"),
    ],
    ids=["width", "int32 table", "a length less", "a head less", "entry", "no scale", "a scale"],
)
def test_refuses(change, words):
    assert words in str(check_refusal(mla_decode, SMALL, PORTABLE, change))


def test_validity_sees_a_context_past_the_table():
    a = draw(mla_decode, SMALL, dtype=torch.float32)
    a["context_lens"][1] += 8
    with pytest.raises(ValueError, match="block table holds 96"):
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
    check_meta(mla_decode, SMALL, PORTABLE)


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


def test_control_scale_of_the_pages_forgotten_in_the_scores():
    def broken(*, page_scale, scale, **a):
        return naive(**a, page_scale=page_scale, scale=scale / float(page_scale))

    check_control(mla_decode, FP8, broken)


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


def check_choice(choose, cell, served):
    """Whether a kernel serves a cell, and if it does, in tiles that fit."""
    from tercel.ops._lib.kernel_latent_parts import Context

    a = draw(mla_decode, cell, dtype=torch.bfloat16)
    context = Context(**{name: a[name] for name in Context._fields})
    config = choose(context, cell["L"])
    assert (config is not None) == served
    if config is not None:
        tiles = context.capacity // config.tokens
        assert cell["PS"] % config.tokens == 0 and 1 <= config.parts <= tiles


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """Both launches, interpreted, at small sizes; the published ones run on a GPU."""

    TINY = Cell(
        "rows of many parts, two blocks of queries, no whole block of tokens",
        **{"V": 24, "L": 32, "E": 48, "H": 5, "width": 4, "PS": 16, "PAGES": 60, "gated": True},
        contexts=(0, 60, 61, 300),
    )
    CODES = Cell(
        "FP8 pages",
        **{"V": 16, "L": 32, "E": 48, "H": 3, "width": 2, "PS": 32, "PAGES": 9, "gated": True},
        contexts=(40, 100),
        fp8=True,
    )

    @pytest.fixture
    def run(self):
        return mla_decode.using("triton")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", [SMALL, TINY, CODES], ids=lambda cell: cell.why)
    def test_cells(self, cell, dtype):
        """All that lies past the rows' ends is NaN."""
        check_cell(mla_decode, cell, "triton", dtype=dtype)

    @pytest.mark.parametrize("parts", [1, 3, 40])
    @pytest.mark.parametrize("fused", [False, True])
    def test_any_number_of_parts(self, monkeypatch, parts, fused):
        from tercel.ops._lib import kernel_latent_merge, kernel_latent_parts
        from tercel.ops.attention.mla_decode import kernel_triton as module

        config = kernel_latent_merge.Config(16, 8, 4, 1, parts, 2)
        merge = kernel_latent_merge.Merge(fused, 1, 8, 4)
        monkeypatch.setattr(module, "choose", lambda *_: config)
        monkeypatch.setattr(kernel_latent_parts, "choose_merge", lambda *_: merge)
        check_cell(mla_decode, SMALL, "triton")

    def test_scratch_is_not_read_before_it_is_written(self, run):
        """Fresh memory is NaN."""
        a = draw(mla_decode, SMALL, dtype=torch.float32)
        with poisoned_memory():
            assert torch.empty(1).isnan()
            assert run(**a).isfinite().all()

    def test_replay(self):
        check_replay(mla_decode, SMALL, "triton")

    def test_bits_repeat_and_rows_do_not_depend_on_their_neighbours(self, run):
        a = draw(mla_decode, SMALL, dtype=torch.bfloat16)
        before = run(**a)
        assert torch.equal(run(**a), before)
        a["query"][2:] = 7
        a["context_lens"][1:] = torch.tensor([2, 9])
        a["pages"][a["block_table"][1, 1:3]] = 5
        assert torch.equal(run(**a)[:2], before[:2])

    def test_a_context_past_the_table_is_cut(self, run):
        """It reads nothing that is not the table's."""
        a = draw(mla_decode, SMALL, dtype=torch.float32)
        a["pages"].nan_to_num_()
        longest = a["context_lens"].clone()
        longest[1] = a["block_table"].shape[1] * 16 - 2
        expected = run(**{**a, "context_lens": longest})
        longest[1] += 1000
        assert torch.equal(run(**{**a, "context_lens": longest}), expected)

    @pytest.mark.parametrize(
        ("sizes", "words"), [({"PS": 4}, "pages of 4"), ({"L": 24, "E": 40}, "24 \\+ 16")]
    )
    def test_refuses_what_its_tiles_do_not_fit(self, run, sizes, words):
        cell = Cell("", **{**SMALL.sizes, **sizes, "PAGES": 90})
        with pytest.raises(ValueError, match=words):
            run(**draw(mla_decode, cell, dtype=torch.float32))

    def test_control_parts_merged_without_their_weights(self, monkeypatch):
        from tercel.ops._lib import kernel_latent_parts
        from tercel.ops.attention.mla_decode import kernel_triton

        attend = kernel_latent_parts.attend

        def broken(*args):
            mixed, weight = attend(*args)
            return mixed, torch.zeros_like(weight)

        monkeypatch.setattr(kernel_latent_parts, "attend", broken)
        check_control(mla_decode, SMALL, kernel_triton.mla_decode)

    @pytest.mark.parametrize(
        ("changes", "served"),
        [
            ({}, True),
            ({"fp8": True}, True),
            ({"H": 4, "width": 2}, True),
            ({"width": 2}, False),
            ({"PS": 16, "PAGES": 40}, False),
            ({"E": 528}, False),
        ],
        ids=["bf16", "fp8", "two tokens", "twelve queries", "small pages", "turned part"],
    )
    def test_what_gluon_serves(self, changes, served):
        """In tiles that a page holds whole, and no more parts than tiles."""
        from tercel.ops.attention.mla_decode.kernel_gluon import choose

        check_choice(choose, Cell("", **{**ENDS.sizes, **changes}), served)

    @pytest.mark.parametrize(
        ("changes", "served"),
        [
            ({}, True),
            ({"H": 33, "width": 1}, True),
            ({"H": 4}, False),
            ({"fp8": True}, False),
            ({"PS": 32}, False),
            ({"L": 256, "E": 320}, False),
        ],
        ids=["48 queries", "33", "32", "fp8", "small pages", "small entries"],
    )
    def test_what_warpgroups_serve(self, changes, served):
        """In tiles that a page holds whole, and no more parts than tiles."""
        from tercel.ops.attention.mla_decode.kernel_gluon_sm_90 import choose

        check_choice(choose, Cell("", **{**DRAFTS.sizes, "PAGES": 20, **changes}), served)

    @pytest.mark.parametrize("name", ["gluon", "gluon_sm_90"])
    def test_gluon_leaves_the_rest_to_triton(self, name):
        check_cell(mla_decode, SMALL, name)
