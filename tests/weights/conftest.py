"""Tiny random checkpoints, and copies of them with something changed."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tercel.core.model import ModelConfig
from tercel.weights.checkpoint import INDEX
from tercel.weights.quantization import ATTENTION, ROUTED, matrices, with_nvfp4
from tercel.weights.table import KIMI_K3
from tercel.weights.tiny import FAMILIES, tiny_config
from tercel.weights.write import write_random_checkpoint

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "kv_lora_rank": 32,
    "linear_attn_config.head_dim": 32,
}


class Model:
    """A model directory; `tensors` are read by the safetensors library alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def shards(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))

    def tensors(self) -> dict:
        return {name: value for shard in self.shards for name, value in load_file(shard).items()}

    def shard_of(self, name: str) -> Path:
        return self.path / self.index()["weight_map"][name]

    def change(self, name: str, change, index: bool = True) -> None:
        """Replaces one tensor by change(tensor), None removes it; `index`: keep it in step."""
        shard = self.shard_of(name)
        tensors = load_file(shard)
        value = change(tensors.pop(name))
        if value is not None:
            tensors[name] = value
        save_file(tensors, shard)
        if index:
            self.reindex()

    def add(self, name: str, value, shard: Path | None = None, index: bool = True) -> None:
        shard = shard or self.shards[0]
        save_file({**load_file(shard), name: value}, shard)
        if index:
            self.reindex()

    def index(self) -> dict:
        return json.loads((self.path / INDEX).read_text())

    def write_index(self, index) -> None:
        (self.path / INDEX).write_text(json.dumps(index))

    def reindex(self) -> None:
        tensors = self.tensors()
        total = sum(value.nbytes for value in tensors.values())
        names = {name: shard.name for shard in self.shards for name in load_file(shard)}
        self.write_index({"metadata": {"total_size": total}, "weight_map": names})


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> dict[str, Model]:
    models = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        config = tiny_config(family, 512, changes=SMALL)
        write_random_checkpoint(path, config, num_shards=3, seed=1)
        models[family] = Model(path)
    return models


@pytest.fixture(scope="session")
def nvfp4_original(tmp_path_factory) -> Model:
    """K3 as its NVFP4 checkpoint is published, with matrices of several FP8 blocks that ranks do
    not divide at their boundaries."""
    changes = SMALL | {"hidden_size": 160, "linear_attn_config.head_dim": 48}
    base = tiny_config("kimi_k3", 512, changes=changes)
    every = matrices(ModelConfig.from_dict(base), KIMI_K3)
    config, _ = with_nvfp4(base, [m for m in every if m.kind in (ROUTED, ATTENTION)])
    path = tmp_path_factory.mktemp("nvfp4")
    write_random_checkpoint(path, config, num_shards=3, seed=2)
    return Model(path)


@pytest.fixture
def nvfp4(nvfp4_original, tmp_path) -> Model:
    """A copy to change."""
    shutil.copytree(nvfp4_original.path, tmp_path / "nvfp4")
    return Model(tmp_path / "nvfp4")


@pytest.fixture
def kimi_k3(originals, tmp_path) -> Model:
    """A copy to change."""
    shutil.copytree(originals["kimi_k3"].path, tmp_path / "model")
    return Model(tmp_path / "model")
