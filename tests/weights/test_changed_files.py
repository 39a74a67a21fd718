"""A checkpoint that changes while it is loaded: an error that names the file, never a mixture."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.errors import CheckpointError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.load import load_model
from tests.weights.loading import CPU


def rewrite(shard) -> None:
    """Other values of the same names and shapes, written in place."""
    changed = shard.with_name("changed")
    save_file({name: x + 1 for name, x in load_file(shard).items()}, changed)
    shard.write_bytes(changed.read_bytes())
    changed.unlink()


def replace(shard) -> None:
    """Another file of the same bytes and time under the name, as a download tool moves it there."""
    copy = shard.with_name("copy")
    shutil.copy2(shard, copy)
    os.replace(copy, shard)


def truncate(shard) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


def error_of(model, change, at: float) -> str:
    """Loads, and changes a file after the share `at` of the bytes."""
    config, checkpoint = ModelConfig.load(model.path), Checkpoint.open(model.path)
    changed = False

    def progress(done: int, total: int) -> None:
        nonlocal changed
        if not changed and done >= at * total:
            changed = True
            change()

    with pytest.raises(CheckpointError) as caught:
        options = {"dtype": torch.float32, "device": CPU, "progress": progress}
        load_model(checkpoint, config, Layout(), 0, **options)
    assert changed
    return str(caught.value)


@pytest.mark.parametrize("at", [0, 0.5, 1], ids=["at the start", "half-way", "at the end"])
@pytest.mark.parametrize("change", [rewrite, replace, truncate])
@pytest.mark.parametrize("which", [0, 2], ids=["first shard", "last shard"])
def test_change_during_the_load(kimi_k3, change, at, which):
    shard = kimi_k3.shards[which]
    text = error_of(kimi_k3, lambda: change(shard), at)
    assert text.startswith(f"{shard}: changed while the checkpoint was read")


def test_file_that_goes_away(kimi_k3):
    shard = kimi_k3.shards[2]
    text = error_of(kimi_k3, shard.unlink, 0.1)
    assert text.startswith(f"{shard}: No such file or directory")


def test_change_between_opening_and_loading(kimi_k3):
    checkpoint, config = Checkpoint.open(kimi_k3.path), ModelConfig.load(kimi_k3.path)
    rewrite(kimi_k3.shards[1])
    with pytest.raises(CheckpointError, match="changed while the checkpoint was read"):
        load_model(checkpoint, config, Layout(), 0, dtype=torch.float32, device=CPU)


def test_file_that_is_cut_in_a_read(kimi_k3, monkeypatch):
    """After the look at the file, before its bytes are taken: where a mapping ends the process."""
    shard, preadv = kimi_k3.shards[2], os.preadv

    def cut(file, buffers, offset):
        if os.fstat(file).st_ino == shard.stat().st_ino:
            truncate(shard)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    text = error_of(kimi_k3, lambda: None, 0)
    assert text.startswith(f"{shard}: ") and ("ends inside" in text or "changed" in text)


def test_cut_files_are_errors_whatever_the_clock_says(kimi_k3, monkeypatch):
    monkeypatch.setattr("tercel.weights.reader.Reader._check", lambda self, shard: None)
    text = error_of(kimi_k3, lambda: truncate(kimi_k3.shards[1]), 0.1)
    assert text.startswith(f"{kimi_k3.shards[1]}: ends inside language_model")
