"""Writes checkpoints in the published form: numbered shards and an index with their total size."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tercel.weights.checkpoint import INDEX
from tercel.weights.manifest import Entry, manifest_from_config
from tercel.weights.random import TORCH_DTYPES, random_tensor


def write_shards(
    out: Path, shards: Sequence[Sequence[str]], tensor: Callable[[str], torch.Tensor]
) -> None:
    """Writes one file per list of names, holding one file's tensors at a time, and the index."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        tensors = {name: tensor(name).contiguous() for name in names}
        save_file(tensors, out / file, metadata={"format": "pt"})
        total += sum(value.nbytes for value in tensors.values())
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / INDEX, index)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_random_checkpoint(
    out: Path, config_json: dict[str, Any], *, num_shards: int = 1, seed: int = 0
) -> None:
    """config.json, generation_config.json and random tensors of every name that it implies."""
    entries = {entry.key: entry for entry in manifest_from_config(config_json).entries}
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def tensor(key: str) -> torch.Tensor:
        entry = entries[key]
        value = random_tensor(key, entry.shape, TORCH_DTYPES[entry.dtype], generator)
        if entry.used is not None:
            value.view(-1)[entry.used :] = 0
        return value

    write_shards(out, balanced_shards(list(entries.values()), num_shards), tensor)
    write_json(out / "config.json", config_json)
    sampling = {"temperature": 1.0, "top_p": 1.0, "eos_token_id": config_json["eos_token_id"]}
    write_json(out / "generation_config.json", sampling)


def balanced_shards(entries: Sequence[Entry], count: int) -> list[list[str]]:
    """Neighbouring tensors together, shards of about the same number of bytes, none empty."""
    count = min(count, len(entries))
    total = sum(entry.num_bytes for entry in entries)
    shards: list[list[str]] = [[]]
    done = 0
    for index, entry in enumerate(entries):
        full = done >= total * len(shards) / count
        if (
            shards[-1]
            and len(shards) < count
            and (full or len(entries) - index <= count - len(shards))
        ):
            shards.append([])
        shards[-1].append(entry.key)
        done += entry.num_bytes
    return shards
