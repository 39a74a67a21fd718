"""Configurations of published checkpoints, by name."""

import json
from importlib.resources import files
from typing import Any

from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.weights.quantization import ATTENTION, ROUTED, matrices, with_nvfp4
from tercel.weights.table import KIMI_K3

NAMES = ("kimi_k3_mxfp4", "kimi_k3_nvfp4", "kimi_linear_48b")

TOTAL_BYTES = {"kimi_k3_mxfp4": 1_560_860_324_864}
"""metadata.total_size of the published index, where it is known."""


def published_config(name: str) -> dict[str, Any]:
    """The parsed config.json of a published checkpoint.

    That of kimi_k3_nvfp4 follows from its recipe: the MXFP4 one with NVFP4 for the routed experts
    and FP8 in blocks for every attention projection.
    """
    if name not in NAMES:
        raise ConfigError(f"model: {name!r} is not a published name; there is {', '.join(NAMES)}")
    if name == "kimi_k3_nvfp4":
        base = published_config("kimi_k3_mxfp4")
        every = matrices(ModelConfig.from_dict(base), KIMI_K3)
        return with_nvfp4(base, [m for m in every if m.kind in (ROUTED, ATTENTION)])[0]
    text = (files("tercel.weights") / "data" / f"{name}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config
