"""Logits that mlx-lm and transformers computed, and the reference on the same weights."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tercel.reference.kimi_k3 import Config, Model
from tercel.reference.weights import load_checkpoint_tensors

ROOT = Path(__file__).parents[2]
TOLERANCE = {"kimi_k3": 1e-3, "kimi_linear": 1e-4}
"""max|a - b| / max|b|. Measured 2.9e-5 and 7.5e-6, the size of either side's own fp32 rounding."""


@dataclass(frozen=True)
class Vector:
    config: Config
    tensors: dict[str, Tensor]
    tokens: Tensor
    logits: Tensor

    def run(self, config: Config | None = None, tensors: dict[str, Tensor] | None = None) -> Tensor:
        model = Model(config or self.config)
        load_checkpoint_tensors(model, tensors or self.tensors)
        with torch.no_grad():
            return model(self.tokens)

    def error(self, logits: Tensor) -> float:
        return float((logits - self.logits).abs().max() / self.logits.abs().max())


def read(name: str) -> Vector:
    path = ROOT / "tests/vectors" / name
    expected = load_file(path / "expected.safetensors")
    config = Config.from_dict(json.loads((path / "config.json").read_text()))
    tensors = load_file(path / "model.safetensors")
    return Vector(config, tensors, expected["tokens"], expected["logits"])
