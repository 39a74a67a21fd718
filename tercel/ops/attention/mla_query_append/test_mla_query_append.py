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
from tercel.ops.attention.mla_query_append import CONTRACT, mla_query_append
from tercel.ops.attention.mla_query_append.reference import mla_query_append as naive

CELL, _, DIRECT = CONTRACT.cells


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
    ],
    ids=["norm alone", "no latent", "a row too few", "rank", "short query", "bf16 pages"],
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
