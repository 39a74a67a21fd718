"""The tree decides and says why; off, auto and require differ in what a miss means."""

from dataclasses import replace

import pytest

from tercel.config import EngineConfig
from tercel.core.arch import Arch
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.errors import NoTarget
from tercel.targets.routing import Question, checkpoint_name, route
from tercel.targets.table import TargetRow
from tercel.weights.published import published_config

ROWS = (
    TargetRow("kimi_k3_mxfp4", "sm_90", "tp16_moetp4ep4", "kimi", "best"),
    TargetRow("kimi_k3_mxfp4", "sm_103", "tp16_moetp4ep4", "kimi", "best", in_auto=False),
)


def question(mode="auto", layout="tp16_moetp4ep4", arch=Arch.SM_90, **changes) -> Question:
    model = replace(ModelConfig.from_dict(published_config("kimi_k3_mxfp4")), **changes)
    config = EngineConfig(model="k3", mode=mode, layout=layout)
    return Question(model, config, Layout.parse(layout), arch)


def test_published_checkpoints_are_recognised():
    assert checkpoint_name(question().model) == "kimi_k3_mxfp4"
    assert checkpoint_name(question(quant_method="modelopt_mixed").model) == "kimi_k3_nvfp4"
    assert checkpoint_name(question(num_experts=512).model) is None


def test_a_match():
    routed = route(question(), ROWS)
    assert routed.row is ROWS[0]
    assert [line.label for line in routed.trace.lines] == [
        "mode",
        "checkpoint",
        "arch",
        "layout",
        "in auto",
        "target",
    ]


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"num_hidden_layers": 92}, "checkpoint"),
        ({"quant_method": None}, "checkpoint"),
        ({"arch": Arch.SM_100}, "arch"),
        ({"arch": None}, "arch"),
        ({"layout": "tp16"}, "layout"),
        ({"layout": "tp16_moetp16ep1"}, "layout"),
        ({"arch": Arch.SM_103}, "in auto"),
    ],
)
def test_a_miss_names_its_criterion(changes, label):
    routed = route(question(**changes), ROWS)
    assert routed.row.name == f"any__any__{question(**changes).layout.name}"
    assert routed.row.policy == "best"
    last = routed.trace.lines[-1]
    assert last.label == label and last.outcome.startswith("no match")


def test_require_raises_with_the_trace_and_the_nearest_target():
    with pytest.raises(NoTarget) as caught:
        route(question(mode="require", layout="tp16"), ROWS)
    text = str(caught.value)
    assert "expert split unset" in text
    assert "kimi_k3_mxfp4__sm_90__tp16_moetp4ep4: set layout=tp16_moetp4ep4" in text


def test_require_may_choose_a_row_that_auto_may_not():
    assert route(question(mode="require", arch=Arch.SM_103), ROWS).row is ROWS[1]
    assert "mode=require" in (route(question(arch=Arch.SM_103), ROWS[1:]).nearest or "")


def test_off_searches_nothing():
    routed = route(question(mode="off"), ROWS)
    assert routed.row.policy == "portable"
    assert [line.label for line in routed.trace.lines] == ["mode"]
