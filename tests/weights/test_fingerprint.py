"""Two processes see whether they have the same checkpoint."""

import shutil

import torch

from tercel.weights import fingerprint as module
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.fingerprint import file_hash, fingerprint


def of(path):
    return fingerprint(Checkpoint.open(path))


def test_copies_agree_and_trainings_do_not(kimi_k3, tmp_path):
    shutil.copytree(kimi_k3.path, tmp_path / "copy")
    assert of(tmp_path / "copy") == of(kimi_k3.path)
    before = of(kimi_k3.path)
    kimi_k3.change("language_model.model.norm.weight", lambda x: x + 0.5)
    assert of(kimi_k3.path) != before


def test_other_tensors_and_other_places_differ(kimi_k3):
    before = of(kimi_k3.path)
    kimi_k3.add("vision_tower.extra", torch.zeros(4))
    assert of(kimi_k3.path) != before


def test_large_files_are_sampled_from_end_to_end(kimi_k3, monkeypatch):
    monkeypatch.setattr(module, "_WHOLE_BYTES", 0)
    shard, before = kimi_k3.shards[1], of(kimi_k3.path)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert of(kimi_k3.path) != before


def test_missing_files_count(tmp_path):
    file = tmp_path / "config.json"
    missing = file_hash(file)
    file.write_text("{}")
    assert file_hash(file) != missing
