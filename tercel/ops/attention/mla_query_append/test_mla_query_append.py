import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
)
from tercel.contract.draw import draw
from tercel.ops.attention.mla_query_append import CONTRACT, mla_query_append
from tercel.ops.attention.mla_query_append.reference import mla_query_append as naive
from tests.interpreter import INTERPRETED, REASON

CELL, _, DIRECT, MANY, FP8 = CONTRACT.cells


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(mla_query_append, cell, mla_query_append.portable.name, dtype=dtype)


def test_replay():
    check_replay(mla_query_append, CELL, mla_query_append.portable.name)


@pytest.mark.parametrize(
    ("cell", "change", "words"),
    [
        (CELL, lambda a: a.update(q_norm=None), "q_norm is None"),
        (CELL, lambda a: a.update(q_norm=None, q_b=None), "q_b is not None"),
        (CELL, lambda a: a.update(q_b=a["q_b"][1:]), "H*(K+E-L)"),
        (CELL, lambda a: a.update(w_k=a["w_k"][:, :, 1:]), "axis L"),
        (DIRECT, lambda a: a.update(q=a["q"][:, 1:]), "q_b is not None"),
        (CELL, lambda a: a.update(pages=a["pages"].bfloat16()), "pages"),
        (FP8, lambda a: a.update(page_scale=None), "page_scale is None"),
    ],
    ids=["norm alone", "no latent", "a row less", "rank", "short query", "bf16 pages", "no scale"],
)
def test_refuses(cell, change, words):
    error = check_refusal(mla_query_append, cell, mla_query_append.portable.name, change)
    assert words in str(error)


def test_query_meets_entries_as_expanded_keys_do():
    a = draw(mla_query_append, DIRECT, dtype=torch.float64)
    query = mla_query_append(**a)
    entry = a["pages"].flatten(0, 1)[a["slot_mapping"][0]]
    q_nope, q_rope = a["q"].unflatten(-1, (32, 192)).split((128, 64), -1)
    k_nope = a["w_k"] @ entry[:512]
    expected = (q_nope * k_nope).sum(-1) + q_rope @ a["latent"][0, 512:]
    torch.testing.assert_close(query @ entry, expected)


def test_reads_nothing_on_the_host():
    check_meta(mla_query_append, CELL, mla_query_append.portable.name)


def test_control_no_norm_of_the_query_latent():
    def broken(q, q_norm, *others, **eps):
        length = q.square().mean(-1, keepdim=True).sqrt()
        return naive(q * length, q_norm, *others, **{**eps, "q_eps": 1e-5})

    check_control(mla_query_append, CELL, lambda **a: broken(**a))


def test_control_rope_part_first():
    def broken(**a):
        return naive(**a).roll(64, dims=-1)

    check_control(mla_query_append, CELL, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    FEW = Cell("", T=3, Q=48, H=2, K=16, L=32, E=40, PAGES=3, PS=16)
    DIRECT = Cell("", **{**FEW.sizes, "Q": 2 * 24})
    CODES = Cell("", **FEW.sizes, fp8=True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", [FEW, MANY, CODES], ids=str)
    def test_cells(self, cell, dtype):
        check_cell(mla_query_append, cell, "triton", dtype=dtype)

    def test_queries_without_a_latent(self):
        check_cell(mla_query_append, self.DIRECT, "triton")

    @pytest.mark.parametrize("cell", [FEW, CODES], ids=str)
    def test_roundings(self, cell):
        check_roundings(mla_query_append, cell, "triton")

    def test_replay(self):
        check_replay(mla_query_append, self.CODES, "triton", dtype=torch.bfloat16)

    def test_rows_do_not_depend_on_their_neighbours(self):
        first, second = (draw(mla_query_append, self.FEW, dtype=torch.bfloat16) for _ in range(2))
        run = mla_query_append.using("triton")
        before = run(**first)
        second["q"][1:] = 1e30
        second["latent"][1:] = float("nan")
        assert torch.equal(run(**second)[0], before[0])
        slot = first["slot_mapping"][0]
        kept = [a["pages"].flatten(0, 1)[slot] for a in (first, second)]
        assert torch.equal(*kept)
