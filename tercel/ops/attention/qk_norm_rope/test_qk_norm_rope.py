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
from tercel.ops.attention.qk_norm_rope import CONTRACT, qk_norm_rope
from tercel.ops.attention.qk_norm_rope import portable as fast
from tests.interpreter import INTERPRETED, REASON

NANO, _, PAIRS = CONTRACT.cells
PORTABLE = qk_norm_rope.portable.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(qk_norm_rope, cell, PORTABLE, dtype=dtype)


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_rounds_once(cell):
    check_roundings(qk_norm_rope, cell, PORTABLE)


def test_replay():
    check_replay(qk_norm_rope, NANO, PORTABLE)


def test_meta():
    check_meta(qk_norm_rope, NANO, PORTABLE)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distances_only(interleaved):
    a = draw(qk_norm_rope, PAIRS, dtype=torch.float64)
    a["interleaved"], a["qkv"] = interleaved, a["qkv"][:1].expand(9, -1).contiguous()
    scores = []
    for start in (0, 5000):
        q, k = qk_norm_rope(**{**a, "positions": torch.arange(9) + start})
        scores.append(q[:, 0] @ k[:, 0].T)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-6, atol=1e-6)
    assert scores[0].std() > 0.1


def test_position_zero_is_the_norm_alone():
    a = draw(qk_norm_rope, NANO, dtype=torch.float32)
    a["positions"].zero_()
    q, _ = qk_norm_rope(**a)
    heads = a["qkv"].view(7, 8, 64)[:, :4]
    expected = torch.nn.functional.rms_norm(heads, (64,), a["q_norm"], 1e-5)
    torch.testing.assert_close(q, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(qkv=a["qkv"][:, :-64]),
        lambda a: a.update(inv_freq=a["inv_freq"][:-1]),
        lambda a: a.update(positions=a["positions"].int()),
        lambda a: a.update(kv_heads=3),
        lambda a: a.update(k_norm=a["k_norm"].bfloat16()),
    ],
    ids=["a head less", "frequencies", "i32", "heads do not divide", "bf16 norm"],
)
def test_refuses(change):
    check_refusal(qk_norm_rope, NANO, PORTABLE, change)


def test_control_the_other_pairs():
    def broken(interleaved, **rest):
        return fast.qk_norm_rope(interleaved=not interleaved, **rest)

    check_control(qk_norm_rope, NANO, broken)


def test_control_norm_over_all_heads():
    def broken(qkv, **rest):
        q, k = fast.qk_norm_rope(qkv, **rest)
        heads = qkv.view(qkv.shape[0], -1, q.shape[2])
        own = heads[:, : q.shape[1]].square().mean(-1, keepdim=True)
        return q * (own / own.mean(1, keepdim=True)).sqrt(), k

    check_control(qk_norm_rope, NANO, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
    def test_cells(self, cell, dtype):
        check_cell(qk_norm_rope, cell, "triton", dtype=dtype)

    @pytest.mark.parametrize("cell", [NANO, PAIRS], ids=str)
    def test_rounds_once(self, cell):
        check_roundings(qk_norm_rope, cell, "triton")

    def test_replay(self):
        check_replay(qk_norm_rope, NANO, "triton", dtype=torch.bfloat16)
