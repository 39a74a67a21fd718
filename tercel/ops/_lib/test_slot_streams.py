import pytest
import torch

from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_slot_products import Experts, Matrix
from tercel.ops._lib.kernel_slot_streams import Stream, choose, columns
from tercel.ops._lib.kernel_slot_wgmma import Block


def packed(rows, depth):
    split = Split(depth)
    shape = (2, rows // 16, split.parts, split.loads, 32, 4)
    return Matrix(torch.empty(shape, dtype=torch.int32, device="meta"), torch.empty(0))


def experts(width):
    return Experts(packed(2 * width, 3584), packed(3584, width), 0, Activation("silu", None, None))


@pytest.mark.parametrize(
    ("slots", "kind", "kind_e4m3"),
    [(100, Stream, Stream), (60, Block, Stream), (30, Block, Block)],
)
def test_many_slots_stream(slots, kind, kind_e4m3):
    assert type(choose(slots, e4m3=False)) is kind
    assert type(choose(slots, e4m3=True)) is kind_e4m3


@pytest.mark.parametrize(
    ("slots", "width", "times"), [(100, 768, 2), (60, 768, 2), (30, 768, 1), (100, 192, 1)]
)
def test_a_stream_of_e4m3_leaves_gate_and_up_to_what_rounds_them(slots, width, times):
    assert columns(choose(slots, e4m3=True), experts(width), e4m3=True) == times * width
    assert columns(choose(slots, e4m3=False), experts(width), e4m3=False) == width
