import pytest
import torch

from tercel.contract.check import check_cell, check_control, check_meta, check_refusal, check_replay
from tercel.ops.moe.route import CONTRACT, route
from tests.interpreter import INTERPRETED, REASON

CELL = CONTRACT.cells[1]
PORTABLE = route.portable.name
OPTIONS = {"top_k": 4, "scaling": 1.0, "renormalize": True}


@pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
def test_cells(cell):
    check_cell(route, cell, PORTABLE)


def test_meta():
    check_meta(route, CELL, PORTABLE)


def test_replay():
    check_replay(route, CELL, PORTABLE)


def test_ties_go_to_the_lower_id():
    ids, weights = route(torch.zeros(2, 16), torch.zeros(16), **OPTIONS)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


def test_bias_selects_but_does_not_weigh():
    bias = torch.zeros(16)
    bias[[3, 7, 9, 11]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    ids, weights = route(torch.zeros(1, 16), bias, **OPTIONS)
    assert ids.tolist() == [[3, 7, 9, 11]]
    assert weights.tolist() == [[0.25] * 4]


def test_a_row_of_nan_gets_ids_and_disturbs_no_other():
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    alone = route(logits[2:], torch.zeros(16), **OPTIONS)
    logits[1] = float("nan")
    ids, weights = route(logits, torch.zeros(16), **OPTIONS)
    assert ids.min() >= 0 and ids.max() < 16
    assert torch.equal(ids[2:], alone[0]) and torch.equal(weights[2:], alone[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(logits=a["logits"].bfloat16()),
        lambda a: a.update(bias=a["bias"].bfloat16()),
        lambda a: a.update(top_k=17),
        lambda a: a.update(top_k=0),
        lambda a: a.update(scaling=1),
    ],
    ids=["bf16 logits", "bf16 bias", "more than there are", "none", "scaling is an integer"],
)
def test_refuses(change):
    check_refusal(route, CELL, PORTABLE, change)


def test_control_weights_with_the_bias():
    def broken(logits, bias, *, top_k, scaling, renormalize):
        values, ids = (torch.sigmoid(logits) + bias).topk(top_k)
        return ids, values / values.sum(1, keepdim=True)

    check_control(route, CELL, broken)


@pytest.mark.skipif(not INTERPRETED, reason=REASON)
class TestTriton:
    """The kernel, interpreted."""

    @pytest.mark.parametrize("cell", CONTRACT.cells, ids=str)
    def test_cells(self, cell):
        check_cell(route, cell, "triton")

    def test_replay(self):
        check_replay(route, CONTRACT.cells[0], "triton")

    def test_ties_go_to_the_lower_id(self):
        ids, weights = route.using("triton")(torch.zeros(2, 16), torch.zeros(16), **OPTIONS)
        assert ids.tolist() == [[0, 1, 2, 3]] * 2
        assert weights.tolist() == [[0.25] * 4] * 2

    def test_a_row_of_nan_gets_distinct_ids_and_disturbs_no_other(self):
        logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
        run = route.using("triton")
        alone = run(logits[2:], torch.zeros(16), **OPTIONS)
        logits[1] = float("nan")
        ids, weights = run(logits, torch.zeros(16), **OPTIONS)
        assert len(set(ids[1].tolist())) == 4 and ids.min() >= 0 and ids.max() < 16
        assert torch.equal(ids[2:], alone[0]) and torch.equal(weights[2:], alone[1])
