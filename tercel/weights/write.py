"""Writes random checkpoints in the published form."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tercel.weights.header import TORCH_DTYPES
from tercel.weights.manifest import Entry, manifest_from_config
from tercel.weights.random import random_tensor
from tercel.weights.shards import Piece, Planned, whole, write_json, write_shards


def write_random_checkpoint(
    out: Path, config_json: dict[str, Any], *, num_shards: int = 1, seed: int = 0
) -> None:
    """config.json, generation_config.json and random tensors of every name that it implies."""
    entries = manifest_from_config(config_json).entries
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def pieces(shard: Sequence[Entry]) -> Iterator[Piece]:
        for entry in shard:
            value = random_tensor(entry.key, entry.shape, TORCH_DTYPES[entry.dtype], generator)
            if entry.used is not None:
                value.view(-1)[entry.used :] = 0
            yield whole(entry.key, value)

    write_shards(
        out,
        [
            ([Planned(entry.key, entry.dtype, entry.shape) for entry in shard], pieces(shard))
            for shard in balanced_shards(entries, num_shards)
        ],
    )
    write_json(out / "config.json", config_json)
    sampling = {"temperature": 1.0, "top_p": 1.0, "eos_token_id": config_json["eos_token_id"]}
    write_json(out / "generation_config.json", sampling)


def balanced_shards(entries: Sequence[Entry], count: int) -> list[list[Entry]]:
    """Neighbouring tensors together, shards of about the same number of bytes, none empty."""
    count = min(count, len(entries))
    total = sum(entry.num_bytes for entry in entries)
    shards: list[list[Entry]] = [[]]
    done = 0
    for index, entry in enumerate(entries):
        full = done >= total * len(shards) / count
        if (
            shards[-1]
            and len(shards) < count
            and (full or len(entries) - index <= count - len(shards))
        ):
            shards.append([])
        shards[-1].append(entry)
        done += entry.num_bytes
    return shards
