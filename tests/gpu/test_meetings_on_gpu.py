"""Programs that meet inside a launch: what they leave, and what a replayed graph finds."""

import pytest
import torch

from tercel.contract import Cell
from tercel.contract.draw import draw
from tercel.ops.spec.accept import accept
from tercel.ops.spec.markov_chain import markov_chain

pytestmark = pytest.mark.gpu

SMALL, LARGE = {"R": 40, "G": 7, "V": 1280}, {"R": 3, "G": 7, "V": 163840}
CASES = [
    *(
        (accept, "counters", Cell("", **sizes, kind=kind, rule=rule))
        for sizes in (SMALL, LARGE)
        for kind, rule in (
            ("greedy", "match"),
            ("plain", "match"),
            ("drawn", "token"),
            ("drawn", "block"),
            ("certain", "block"),
            ("filtered", "block"),
        )
    ),
    *(
        (markov_chain, "board", Cell("", R=requests, G=7, V=10240, D=256, greedy=greedy))
        for requests in (1, 8, 70)
        for greedy in (True, False)
    ),
]


@pytest.mark.parametrize(("op", "place", "cell"), CASES, ids=str)
def test_replays_repeat_and_leave_zeros(op, place, cell):
    given = draw(op, cell, dtype=torch.bfloat16, device="cuda")
    given[place] = torch.zeros(1 << 21, dtype=given[place].dtype, device="cuda")
    tokens, *_ = op.portable.run(**given)
    run = op.implementation("triton").run
    first = run(**given)
    assert torch.equal(first[0], tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [run(**given) for _ in range(3)]
    for _ in range(30):
        graph.replay()
    torch.cuda.synchronize()
    assert not given[place].any()
    for results in again:
        assert all(torch.equal(x, y) for x, y in zip(results, first, strict=True))
