"""The tree decides and says why; off, auto and require differ in what a miss means."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tercel.config import EngineConfig
from tercel.core.arch import Arch
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.errors import ConfigError, NoTarget
from tercel.targets.program import load_recipe
from tercel.targets.routing import Question, checkpoint_name, nearest_target, route
from tercel.targets.table import NAMED
from tercel.weights.published import published_config


@cache
def published_model(name) -> ModelConfig:
    return ModelConfig.from_dict(published_config(name))


def question(
    mode="auto", layout="tp16_moetp4ep4", arch=Arch.SM_100, model="kimi_k3_mxfp4", **changes
) -> Question:
    """What the engine would ask; `changes` of fields that it refuses are set behind its back."""
    settings = {key: changes.pop(key) for key in ("drafter", "kv_dtype") if key in changes}
    parsed = replace(published_model(model), **changes)
    config = EngineConfig(model="k3", mode=mode, layout=layout)
    for key, value in settings.items():
        object.__setattr__(config, key, value)
    return Question(parsed, config, Layout.parse(layout), arch)


def chosen(**changes) -> str | None:
    try:
        routed = route(question(**changes))
    except NoTarget:
        return None
    return routed.row.name if routed.is_named else None


K3_OUTCOMES = [
    ("tp16_moetp4ep4", "kimi_k3_mxfp4__sm_100__tp16_moetp4ep4"),
    ("tp16_moetp16ep1", "kimi_k3_mxfp4__sm_100__tp16_moetp16ep1"),
    ("tp16", None),
    ("tp16_moetp1ep16", None),
    ("dep16", None),
    ("tp8_pp2", None),
    ("tp8_moetp4ep2", None),
    ("tp32_moetp4ep8", None),
]
"""The published system's table for MXFP4 on sm_100; an unset split is not sixteen by one."""


@pytest.mark.parametrize(("layout", "name"), K3_OUTCOMES)
def test_mxfp4_outcomes_on_sm_100(layout, name):
    assert chosen(layout=layout) == name


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"arch": Arch.SM_90}, "kimi_k3_mxfp4__sm_90__tp16_moetp4ep4"),
        ({"arch": Arch.SM_90, "layout": "tp8_pp2"}, "kimi_k3_mxfp4__sm_90__tp8_pp2"),
        ({"arch": Arch.SM_103}, None),
        ({"arch": Arch.SM_107}, None),
        ({"arch": Arch.CPU}, None),
        ({"arch": None}, None),
        ({"quant_method": None}, None),
        ({"quant_method": "modelopt_mixed"}, None),
        ({"num_hidden_layers": 92}, None),
        ({"num_experts": 512}, None),
        ({"drafter": "drafter"}, "kimi_k3_mxfp4__sm_100__tp16_moetp4ep4"),
        ({"drafter": "drafter", "layout": "tp16_moetp16ep1"}, None),
        ({"kv_dtype": "float8"}, None),
    ],
)
def test_mxfp4_near_misses(changes, name):
    assert chosen(**changes) == name


@pytest.mark.parametrize("layout", ["tp1_dwdp16", "helix8", "helix16_moetp4ep4", "dep16"])
@pytest.mark.parametrize("kv_dtype", ["float8", "nvfp4"])
@pytest.mark.parametrize("drafter", [None, "drafter"])
def test_nvfp4_outcomes_on_sm_107(layout, kv_dtype, drafter):
    settings = {"layout": layout, "kv_dtype": kv_dtype, "drafter": drafter}
    named = chosen(arch=Arch.SM_107, quant_method="modelopt_mixed", **settings)
    assert named == f"kimi_k3_nvfp4__sm_107__{layout}"


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_dtype": "auto"},
        {"layout": "tp16_moetp4ep4"},
        {"layout": "helix16"},
        {"arch": Arch.SM_103},
        {"quant_method": "compressed-tensors"},
    ],
)
def test_nvfp4_near_misses(changes):
    base = {"arch": Arch.SM_107, "quant_method": "modelopt_mixed"}
    assert chosen(**{**base, "layout": "helix8", "kv_dtype": "float8", **changes}) is None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "kimi_linear_bf16__sm_90__tp1"),
        ({"layout": "tp2"}, "kimi_linear_bf16__sm_90__tp2"),
        ({"layout": "tp4"}, None),
        ({"arch": Arch.SM_100}, None),
        ({"quant_method": "compressed-tensors"}, None),
    ],
)
def test_kimi_linear_outcomes(changes, name):
    base = {"model": "kimi_linear_48b", "layout": "tp1", "arch": Arch.SM_90}
    assert chosen(**{**base, **changes}) == name


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"num_hidden_layers": 92}, "shape"),
        ({"quant_method": None}, "quant"),
        ({"arch": Arch.CPU}, "arch"),
        ({"layout": "tp16"}, "layout"),
        ({"drafter": "x", "layout": "tp16_moetp16ep1"}, "speculation"),
        ({"kv_dtype": "nvfp4"}, "kv dtype"),
        ({"arch": Arch.SM_103}, "in auto"),
    ],
)
def test_a_miss_names_its_criterion_last(changes, label):
    last = route(question(**changes)).trace.lines[-1]
    assert (last.label == label and last.outcome.startswith("no match: needs")) or label == "quant"


@pytest.mark.parametrize(
    ("changes", "nearest"),
    [
        ({"layout": "tp16"}, "kimi_k3_mxfp4__sm_100__tp16_moetp4ep4: set layout=tp16_moetp4ep4"),
        ({"arch": Arch.SM_103}, "kimi_k3_mxfp4__sm_103__tp16_moetp4ep4: set mode=require"),
        (
            {"drafter": "x", "layout": "tp16_moetp16ep1"},
            "kimi_k3_mxfp4__sm_100__tp16_moetp4ep4: set layout=tp16_moetp4ep4",
        ),
        (
            {"arch": Arch.SM_107, "layout": "helix8", "kv_dtype": "nvfp4"},
            "kimi_k3_nvfp4__sm_107__helix8: set checkpoint=kimi_k3_nvfp4",
        ),
        ({"num_experts": 512}, None),
    ],
)
def test_nearest_target(changes, nearest):
    assert nearest_target(question(**changes)) == nearest


QUANTIZATIONS = {"kimi_k3_mxfp4": "compressed-tensors", "kimi_k3_nvfp4": "modelopt_mixed"}
MISSES = [
    dict(zip(("arch", "layout", "quant_method", "drafter", "kv_dtype"), values, strict=True))
    for values in product(
        (Arch.SM_90, Arch.SM_103, Arch.SM_107, Arch.CPU),
        ("tp16", "tp16_moetp16ep1", "tp8_pp2", "helix8"),
        ("compressed-tensors", "modelopt_mixed", None),
        (None, "drafter"),
        ("auto", "float8"),
    )
]


def test_doing_what_the_nearest_target_asks_for_leads_to_it():
    """Every change that it names is enough, and none of them can be left out."""
    misses = [changes for changes in MISSES if chosen(**changes) is None]
    assert len(misses) > 150
    for changes in misses:
        name, _, wanted = nearest_target(question(**changes)).partition(": set ")
        steps = [settings_of(change) for change in wanted.split(", ")]
        for omitted in range(-1, len(steps)):
            done = {**changes}
            for index, step in enumerate(steps):
                done |= {} if index == omitted else step
            assert (chosen(**done) == name) == (omitted < 0), (changes, wanted, omitted)


def settings_of(change):
    """The arguments of `question` that do what a nearest target asks for."""
    field, _, value = change.partition("=")
    match field:
        case "checkpoint":
            return {"quant_method": QUANTIZATIONS[value]}
        case "arch":
            return {"arch": Arch(value)}
        case "kv_dtype":
            return {"kv_dtype": value.split(" or ")[0]}
        case "drafter" | "no drafter":
            return {"drafter": None if "no" in field else "drafter"}
    return {field: value}


def test_require_raises_with_the_trace_and_the_nearest_target():
    with pytest.raises(NoTarget) as caught:
        route(question(mode="require", layout="tp16"))
    text = str(caught.value)
    assert "expert split unset" in text
    assert "nearest: kimi_k3_mxfp4__sm_100__tp16_moetp4ep4: set layout=tp16_moetp4ep4" in text


def test_require_may_choose_a_row_that_auto_may_not():
    name = "kimi_k3_mxfp4__sm_103__tp16_moetp4ep4"
    assert chosen(mode="require", arch=Arch.SM_103) == name


def test_off_searches_nothing():
    routed = route(question(mode="off"))
    assert routed.row.policy == "portable"
    assert [line.label for line in routed.trace.lines] == ["mode"]


def test_auto_is_the_default():
    assert EngineConfig(model="k3").mode == "auto"


def test_auto_without_a_target_is_generic():
    routed = route(question(layout="tp16"))
    assert (routed.row.name, routed.row.policy) == ("any__any__tp16", "best")


class TestClaims:
    """What the rows claim, checked without a GPU."""

    def test_identities_are_unique_triples(self):
        names = [row.name for row in NAMED]
        assert len(set(names)) == len(names)
        assert all(len(name.split("__")) == 3 for name in names)

    @pytest.mark.parametrize("row", NAMED, ids=lambda row: row.name)
    def test_parts_exist(self, row):
        assert Layout.parse(row.layout).name == row.layout
        assert row.arch in set(Arch)
        assert callable(load_recipe(row))

    @pytest.mark.parametrize("row", NAMED, ids=lambda row: row.name)
    def test_the_layout_divides_the_published_model_or_names_what_is_not_built(self, row):
        published = {"kimi_linear_bf16": "kimi_linear_48b"}.get(row.checkpoint, row.checkpoint)
        model = published_model(published)
        assert checkpoint_name(model) == row.checkpoint
        try:
            Layout.parse(row.layout).check(model)
        except ConfigError as error:
            assert "is not built" in str(error)

    @pytest.mark.parametrize("row", NAMED, ids=lambda row: row.name)
    def test_every_row_can_be_reached(self, row):
        published = {"kimi_linear_bf16": "kimi_linear_48b"}.get(row.checkpoint, row.checkpoint)
        found = chosen(
            mode="auto" if row.in_auto else "require",
            layout=row.layout,
            arch=Arch(row.arch),
            model=published,
            kv_dtype=sorted(row.kv_dtypes)[0],
        )
        assert found == row.name


def test_published_checkpoints_are_recognised():
    assert checkpoint_name(question().model) == "kimi_k3_mxfp4"
    assert checkpoint_name(question(quant_method="modelopt_mixed").model) == "kimi_k3_nvfp4"
    assert checkpoint_name(question(num_experts=512).model) is None
