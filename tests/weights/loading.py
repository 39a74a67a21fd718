"""Loading checkpoints in tests, and comparing what came of it."""

from dataclasses import fields, is_dataclass

import torch

from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.parameters import ExpertWeights
from tercel.ops._lib import experts
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.load import load_model

CPU = torch.device("cpu")
LAYOUTS = ["tp1", "tp2", "tp4", "tp4_moetp1ep4", "tp4_moetp2ep2", "tp4_moetp4ep1"]


def load(model, layout="tp1", rank=0, dtype=torch.float32, pack=False, **options):
    """`pack`: experts as the plain-torch implementations want them, in values."""
    config = ModelConfig.load(model.path)
    checkpoint = Checkpoint.open(model.path)
    layout = Layout.parse(layout)
    if pack:
        options["packs"] = {"MoeWeights.experts": lambda value: packed(value, dtype)}
    return load_model(checkpoint, config, layout, rank, dtype=dtype, device=CPU, **options)


def packed(value: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    tensors = [getattr(value, item.name) for item in fields(value)]
    return ExpertWeights(*experts.pack(*tensors, dtype=dtype))


def flat(value, path="") -> dict[str, torch.Tensor]:
    """Every tensor of nested weights by dotted path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    found = {}
    if is_dataclass(value):
        for item in fields(value):
            found |= flat(getattr(value, item.name), f"{path}.{item.name}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            found |= flat(item, f"{path}.{index}")
    return found


def assert_same(got, want):
    got, want = flat(got), flat(want)
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert got[path].dtype == value.dtype and torch.equal(got[path], value), path
