import pytest
import torch

from tercel.contract import Cell
from tercel.contract.check import check_cell, check_control, check_meta, check_refusal, check_replay
from tercel.contract.draw import draw
from tercel.ops._lib.kda import SMALL_HEAD
from tercel.ops.linear_attention.kda_commit import CONTRACT, kda_commit
from tercel.ops.linear_attention.kda_commit.reference import kda_commit as naive
from tests.interpreter import INTERPRETED, REASON

CELL = CONTRACT.cells[0]
SMALL = Cell("heads that fit a test", R=2, H=1, D=3, SLOTS=4, **SMALL_HEAD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell, dtype):
    check_cell(kda_commit, cell, kda_commit.portable.name, dtype=dtype)


def test_replay():
    check_replay(kda_commit, CELL, kda_commit.portable.name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(pending=a["pending"].int()), "pending"),
        (lambda a: a.update(draft_g=a["draft_g"].bfloat16()), "draft_g"),
        (lambda a: a.update(draft_beta=a["draft_beta"][:, :2].contiguous()), "axis D"),
        (lambda a: a.update(conv=a["conv"][:, :3].contiguous()), "S > D"),
    ],
    ids=["int32 counts", "bf16 decays", "a draft too few", "no history"],
)
def test_refuses(change, words):
    assert words in str(check_refusal(kda_commit, CELL, kda_commit.portable.name, change))


def test_reads_nothing_on_the_host():
    check_meta(kda_commit, CELL, kda_commit.portable.name)


IMPLEMENTATIONS = [
    "portable",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason=REASON)),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_pending_changes_no_bit(implementation):
    a = draw(kda_commit, SMALL, dtype=torch.float32)
    a["pending"].zero_()
    before = {name: value.clone() for name, value in a.items()}
    kda_commit.using(implementation)(**a)
    for name, value in before.items():
        torch.testing.assert_close(a[name], value, rtol=0, atol=0, equal_nan=True)


def test_control_one_draft_too_many():
    def broken(*args, slots, pending, **pools):
        pools["draft_k"] = pools["draft_k"].nan_to_num()
        naive(**pools, slots=slots, pending=(pending + 1).clamp(max=pools["draft_k"].shape[1]))

    check_control(kda_commit, CELL, broken)


def test_control_window_left_behind():
    def broken(*, conv, **others):
        naive(conv.clone(), **others)

    check_control(kda_commit, CELL, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("cell", [SMALL, CONTRACT.cells[2]], ids=str)
    def test_cells(self, cell, dtype):
        check_cell(kda_commit, cell, "triton", dtype=dtype)

    def test_tiles_of_many_programs(self, monkeypatch):
        from tercel.ops.linear_attention.kda_commit import kernel_triton

        monkeypatch.setattr(kernel_triton, "TILES", kernel_triton.TILES[-1:])
        check_cell(kda_commit, SMALL, "triton", dtype=torch.bfloat16)

    def test_replay(self):
        check_replay(kda_commit, SMALL, "triton")

    def test_control_one_draft_too_few(self):
        def broken(*args, pending, **pools):
            kda_commit.using("triton")(**pools, pending=(pending - 1).clamp(min=0))

        check_control(kda_commit, SMALL, broken)
