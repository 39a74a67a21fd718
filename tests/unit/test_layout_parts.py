import pytest

from tercel.core.layout import Axis, Layout


@pytest.mark.parametrize("name", ["tp1", "tp4", "tp8_moetp2ep4", "tp16_moetp4ep4", "tp4_pp2"])
@pytest.mark.parametrize("axis", Axis)
def test_parts_of_an_axis_are_all_held(name, axis):
    layout = Layout.parse(name)
    parts = [layout.part(axis, rank) for rank in range(layout.world_size)]
    (count,) = {count for _, count in parts}
    assert {index for index, _ in parts} == set(range(count))
    ranges = {layout.local_range(axis, rank, 48) for rank in range(layout.world_size)}
    assert sorted(index for part in ranges for index in part) == list(range(48))


def test_expert_split_covers_each_pair_once():
    layout = Layout.parse("tp16_moetp4ep4")
    pairs = {
        (layout.part(Axis.EXPERTS, rank), layout.part(Axis.EXPERT_WIDTH, rank))
        for rank in range(16)
    }
    assert len(pairs) == 16
    assert layout.local_range(Axis.EXPERTS, 5, 896) == range(224, 448)


@pytest.mark.parametrize(
    ("name", "stages"), [("tp1", [93]), ("tp8_pp2", [47, 46]), ("tp1_pp4", [24, 23, 23, 23])]
)
def test_stages_take_consecutive_layers(name, stages):
    layout = Layout.parse(name)
    ranges = [layout.stage_layers(stage * layout.tp, 93) for stage in range(layout.pp)]
    assert [len(layers) for layers in ranges] == stages
    assert [layer for layers in ranges for layer in layers] == list(range(93))
    assert layout.stage_layers(layout.tp - 1, 93) == ranges[0]
