"""What is wrong with a drafter changes no text, only its acceptance: the gate finds each."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel import LLM
from tercel.gates.acceptance import AcceptanceGate, record, unhealthy
from tercel.targets import drafters

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NANO, DRAFTER = CHECKPOINTS / "nano", CHECKPOINTS / "nano-dspark"
GATE = AcceptanceGate(problems=2, temperatures=(0.0,), batch=2, max_tokens=24, seed=3)


def measure(drafter, **options):
    small = {"page_size": 16, "cache_tokens": 1024, "max_running": 2, "num_threads": 1}
    options = {**small, "adaptive_drafts": False, **options}
    with LLM(NANO, device="cpu", drafter=str(drafter), **options) as llm:
        return GATE.run(llm, lambda done, total: None)


@pytest.fixture(scope="module")
def healthy():
    return measure(DRAFTER)


def change_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"] |= changes
    path.write_text(json.dumps(config))


def random_mask_row(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    mask = json.loads((directory / "config.json").read_text())["dflash_config"]["mask_token_id"]
    row = torch.randn(tensors["embed_tokens.weight"].shape[1])
    tensors["embed_tokens.weight"][mask] = row.to(torch.bfloat16)
    save_file(tensors, path)


def taps_shifted_by_one(directory):
    taps = json.loads((directory / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    change_config(directory, target_layer_ids=[tap - 1 for tap in taps])


def the_other_stream(directory):
    change_config(directory, aux_hidden_stream="prefix")


def the_wrong_slots(directory):
    change_config(directory, shift_label=False)


MUTATIONS = [random_mask_row, taps_shifted_by_one, the_other_stream, the_wrong_slots]


def check(mutated, healthy):
    recorded = record(healthy, GATE)["temperatures"]
    assert unhealthy(healthy, recorded) == []
    assert mutated[0].texts == healthy[0].texts, "a drafter changes no text"
    problems = unhealthy(mutated, recorded)
    assert any("acceptance length" in problem for problem in problems), mutated[0].to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_mutation_fails_the_gate_with_the_text_unchanged(mutate, healthy, tmp_path):
    directory = tmp_path / "mutated"
    shutil.copytree(DRAFTER, directory)
    mutate(directory)
    check(measure(directory), healthy)


@pytest.mark.slow
def test_positions_that_do_not_turn_fail_the_gate(healthy, monkeypatch):
    create = drafters.create_drafter

    def without_rotation(plan):
        plan.weights.inv_freq.zero_()
        return create(plan)

    monkeypatch.setattr("tercel.runtime.drafting.create_drafter", without_rotation)
    check(measure(DRAFTER), healthy)
