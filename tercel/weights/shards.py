"""Writes safetensors files front to back: the header first, then one tensor, or less, at a time."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tercel.errors import CheckpointError
from tercel.weights.checkpoint import INDEX
from tercel.weights.header import DTYPE_BITS

_ALIGNMENT = 8
"""Of the data: readers map tensors of up to eight bytes per element in place."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor that will be written."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


Piece = tuple[str, int, memoryview]
"""Bytes of a tensor: its key, where in it they begin, and they themselves."""


class ShardWriter:
    """One file. Pieces may come in any order; leaving the block checks that all of them came."""

    def __init__(self, path: Path, tensors: Sequence[Planned]) -> None:
        self._path = path
        # Wide elements first, so that every tensor is aligned to its element.
        ordered = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        for tensor in ordered:
            self._starts[tensor.key] = end
            end += tensor.num_bytes
            offsets = [self._starts[tensor.key], end]
            shape = list(tensor.shape)
            header[tensor.key] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text
        self._missing = end
        self._file = path.open("wb")

    def __enter__(self) -> "ShardWriter":
        self._file.write(self._header)
        return self

    def write(self, piece: Piece) -> None:
        key, start, data = piece
        self._file.seek(len(self._header) + self._starts[key] + start)
        self._file.write(data)
        self._missing -= data.nbytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._file:
            if error is not None:
                return
            if self._missing:
                raise CheckpointError(f"{self._path}: {self._missing} bytes were not written")
            self._file.flush()
            os.fsync(self._file.fileno())  # a full disk may show here first


def write_shards(out: Path, shards: Sequence[tuple[Sequence[Planned], Iterable[Piece]]]) -> None:
    """Writes one numbered file per shard, and the index with their total size."""
    weight_map: dict[str, str] = {}
    for number, (tensors, pieces) in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        with ShardWriter(out / file, tensors) as writer:
            for piece in pieces:
                writer.write(piece)
        weight_map |= {tensor.key: file for tensor in tensors}
    total = sum(tensor.num_bytes for tensors, _ in shards for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / INDEX, index)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def whole(key: str, tensor: torch.Tensor) -> Piece:
    """A tensor in one piece."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return key, 0, flat.numpy().data
