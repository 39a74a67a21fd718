"""Configurations of published checkpoints, by name."""

import json
from importlib.resources import files
from typing import Any

from tercel.errors import ConfigError

NAMES = ("kimi_k3_mxfp4", "kimi_linear_48b")


def published_config(name: str) -> dict[str, Any]:
    """The parsed config.json of a published checkpoint."""
    if name not in NAMES:
        raise ConfigError(f"model: {name!r} is not a published name; there is {', '.join(NAMES)}")
    text = (files("tercel.weights") / "data" / f"{name}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config
