"""State is created by one function, in one order, on all ranks, or on none."""

from pathlib import Path

import pytest
import torch

from tercel.core.drafter_formats import read_drafter_config
from tercel.core.layout import Layout
from tercel.errors import ConfigError
from tercel.parallel import SingleGroup, run_threads
from tercel.targets import state
from tercel.targets.state import (
    BOARD,
    CACHE,
    COUNTERS,
    CacheSizes,
    create_board,
    create_context_counters,
    create_counters,
    create_drafter_cache,
)
from tests.targets.models import resolved

SIZES = CacheSizes(num_pages=3, page_size=8, num_slots=3, max_draft=2)


def create(group, sizes=SIZES, layout="tp1", rank=0):
    return CACHE.create(
        resolved("kimi_k3", layout=layout, rank=rank).place,
        group,
        sizes=sizes,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def test_every_layer_has_one_kind_of_cache():
    model, cache = resolved("kimi_k3").place.model, create(SingleGroup())
    assert set(cache.latent) == set(model.mla_layers)
    assert set(cache.latent) | set(cache.kda) == set(range(model.num_hidden_layers))
    assert not set(cache.latent) & set(cache.kda)


def test_a_pipeline_stage_has_the_caches_of_its_layers():
    model = resolved("kimi_k3").place.model
    stages = [create(SingleGroup(), layout="tp1_pp2", rank=rank) for rank in range(2)]
    layers = [sorted([*cache.latent, *cache.kda]) for cache in stages]
    assert layers[0] + layers[1] == list(range(model.num_hidden_layers))
    assert set(stages[1].latent) == {layer for layer in model.mla_layers if layer in layers[1]}


def test_shapes_and_dtypes_of_a_rank():
    model = resolved("kimi_k3").place.model
    layer = next(iter(create(SingleGroup(), layout="tp2").kda.values()))
    heads, dim = model.kda_num_heads // 2, model.kda_head_dim
    assert layer.recurrent.shape == (3, heads, dim, dim)
    assert layer.recurrent.dtype == torch.float32
    assert layer.conv.shape == (3, model.conv_kernel_size - 1 + 2, 3 * heads * dim)
    assert layer.conv.dtype == layer.draft_v.dtype == torch.bfloat16
    assert layer.draft_g.shape == (3, 2, heads, dim)


@pytest.mark.parametrize("sizes", [CacheSizes(1, 8, 3), CacheSizes(3, 8, 1)])
def test_sinks_alone_are_refused(sizes):
    with pytest.raises(ConfigError, match="leave nothing besides the sinks"):
        create(SingleGroup(), sizes)


def test_one_rank_that_cannot_stops_all():
    def body(group):
        with pytest.raises(ConfigError) as caught:
            create(group, CacheSizes(1, 8, 3) if group.rank == 1 else SIZES)
        return str(caught.value)

    messages = run_threads(3, body)
    assert "leave nothing" in messages[1]
    assert messages[0] == messages[2] == "another rank cannot create its caches"


def test_a_second_kind_of_state_is_created_through_the_same_door():
    """An op's own state is a StateSpec too: typed, created before use, with its order stated."""
    from tercel.contract import StateSpec

    def counters(place, group):
        return {layer: torch.zeros(place.layout.tp, dtype=torch.int32) for layer in place.layers}

    spec = StateSpec(
        contents="arrival counters per layer",
        create=counters,
        call_order="once per layer and step",
        wrong_order="a rank waits for ever",
    )
    place = resolved("kimi_k3", layout="tp2").place
    state = spec.create(place, SingleGroup())
    assert [x.shape for x in state.values()] == [(2,)] * place.model.num_hidden_layers


@pytest.mark.parametrize(("spec", "sizes"), [(COUNTERS, (3, 2)), (BOARD, (3, 2))])
def test_places_to_meet_are_zeros_created_before_a_capture(spec, sizes, monkeypatch):
    place = spec.create(*sizes, torch.device("cpu"))
    assert place.numel() >= 3 and not place.any()
    monkeypatch.setattr(state, "_is_capturing", lambda: True)
    with pytest.raises(ConfigError, match="create it first"):
        spec.create(*sizes, torch.device("cpu"))


CPU = torch.device("cpu")
DRAFTER = read_drafter_config(Path(__file__).parents[2] / "checkpoints/nano-dspark")
CREATORS = {
    "cache": lambda: create(SingleGroup()),
    "drafter cache": lambda: create_drafter_cache(
        DRAFTER, Layout.parse("tp1"), sizes=SIZES, dtype=torch.bfloat16, device=CPU
    ),
    "counters": lambda: create_counters(3, 2, CPU),
    "board": lambda: create_board(3, 2, CPU),
    "context counters": lambda: create_context_counters(CPU),
}


@pytest.mark.parametrize("creator", CREATORS)
def test_nothing_is_created_under_capture(creator, monkeypatch):
    CREATORS[creator]()
    monkeypatch.setattr(state, "_is_capturing", lambda: True)
    with pytest.raises(ConfigError, match="create it first"):
        CREATORS[creator]()
