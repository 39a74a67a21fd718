"""The timer on a GPU."""

import pytest
import torch

from tercel.contract.timing import in_graph

pytestmark = pytest.mark.gpu

SIZE = 1 << 20


def test_a_graph_keeps_what_its_calls_read():
    """Memory of tensors that nobody holds goes to whoever asks next."""
    out = torch.zeros(SIZE, device="cuda")

    def reader():
        ones = torch.ones(SIZE, device="cuda")
        return lambda: out.copy_(ones)

    replay = in_graph([reader()])
    held = [torch.full((SIZE,), torch.nan, device="cuda") for _ in range(8)]
    replay()
    assert out.eq(1).all() and held[0].isnan().all()
