import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import check_cell, check_control, check_meta, check_refusal, check_replay
from tercel.contract.draw import draw
from tercel.ops.attention.mla_query_rope import CONTRACT, mla_query_rope
from tercel.ops.attention.mla_query_rope.reference import mla_query_rope as naive
from tercel.ops.attention.qk_norm_rope.reference import rotate
from tests.interpreter import INTERPRETED, REASON

NANO, _, HALVES = CONTRACT.cells
PORTABLE = mla_query_rope.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(mla_query_rope, cell, PORTABLE, dtype=dtype)


@pytest.mark.parametrize("cell", [NANO, HALVES], ids=str)
def test_scores_are_those_of_expanded_keys(cell):
    """query . entry is q . k of the layered form, whose rotation goes pair by pair."""
    a = draw(mla_query_rope, cell, dtype=torch.float64)
    query, entry = mla_query_rope(**a)
    heads, k_dim, rank = a["w_k"].shape
    turn = {"scale": a["rope_scale"], "interleaved": a["interleaved"]}
    normed = torch.nn.functional.rms_norm(a["q"], a["q"].shape[1:], a["q_norm"], 1e-5)
    q = (normed @ a["q_b"].T).unflatten(1, (heads, -1))
    latent = torch.nn.functional.rms_norm(a["latent"][:, :rank], (rank,), a["kv_norm"], 1e-5)
    k_nope = torch.einsum("hkl,tl->thk", a["w_k"], latent)
    k_rope = rotate(a["latent"][:, rank:], a["positions"], a["inv_freq"], **turn)
    q_rope = rotate(q[..., k_dim:], a["positions"], a["inv_freq"], **turn)
    expected = torch.einsum("thk,shk->hts", q[..., :k_dim], k_nope)
    expected = expected + torch.einsum("thd,sd->hts", q_rope, k_rope)
    actual = torch.einsum("the,se->hts", query, entry)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_replay():
    check_replay(mla_query_rope, NANO, PORTABLE)


def test_meta():
    check_meta(mla_query_rope, NANO, PORTABLE)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(q_b=a["q_b"][:-1]),
        lambda a: a.update(inv_freq=a["inv_freq"][:-1]),
        lambda a: a.update(latent=a["latent"][:, :96]),
        lambda a: a.update(positions=a["positions"].int()),
        lambda a: a.update(w_k=a["w_k"].bfloat16()),
    ],
    ids=["a row of q_b", "frequencies", "nothing to turn", "i32", "bf16"],
)
def test_refuses(change):
    check_refusal(mla_query_rope, NANO, PORTABLE, change)


CONTROLS = {
    "the other pairs": {"interleaved": False},
    "eps": {"eps": 1e-1},
    "a scale": {"rope_scale": 1.01},
}


@pytest.mark.parametrize("changes", CONTROLS.values(), ids=CONTROLS)
def test_control(changes):
    check_control(mla_query_rope, NANO, lambda **a: naive(**{**a, **changes}))


def test_control_nothing_turns():
    def broken(positions, **rest):
        return naive(positions=positions * 0, **rest)

    check_control(mla_query_rope, NANO, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    PAIRS = Cell("", T=2, Q=24, H=2, K=8, L=24, E=32)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", [PAIRS, HALVES], ids=str)
    def test_cells(self, cell, dtype):
        check_cell(mla_query_rope, cell, "triton", dtype=dtype)

    def test_replay(self):
        check_replay(mla_query_rope, HALVES, "triton", dtype=torch.bfloat16)
