"""Reads the tensors of a checkpoint, and refuses files that change while they are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from tercel.errors import CheckpointError
from tercel.weights.header import StoredTensor

_MAPPINGS = 8
_MIN_MAPPED_BYTES = 64 * 2**20
"""A mapping is read up to an eighth of its shard or this much, so that few pages are resident."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What changes when a file is written to or replaced."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class Reader:
    """Hands out tensors, one shard at a time, in their stored dtype.

    Every call looks at the shard's stamp first, and `verify` at all of them: a checkpoint that
    changes on the way is an error, never a mixture.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], stamps: Mapping[Path, Stamp]) -> None:
        self._tensors = tensors
        self._stamps = stamps
        self._shard: Path | None = None
        self._open: Any = None
        self._bytes_left = 0
        self._file: BinaryIO | None = None

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor on the CPU as a view of the mapped shard, not read yet.

        Pages become resident when a view is read. They go with the mapping, which is renewed for
        every shard and several times within one, provided that the views of it are gone by then.
        """
        stored = self._tensors[name]
        self._check(stored.shard)
        if stored.shard != self._shard or self._bytes_left < stored.num_bytes:
            self._open = None  # unmaps first
            self._open = safe_open(stored.shard, framework="pt", device="cpu")
            self._shard = stored.shard
            self._bytes_left = max(_MIN_MAPPED_BYTES, stored.shard.stat().st_size // _MAPPINGS)
        self._bytes_left -= stored.num_bytes
        tensor: torch.Tensor = self._open.get_tensor(name)
        return tensor

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytearray:
        """Bytes `start` to `start + num_bytes` of a tensor, copied: a file that is cut meanwhile is
        an error here, where touching a mapped page of it would end the process."""
        stored = self._tensors[name]
        self._check(stored.shard)
        file = self._file
        if file is None or file.name != str(stored.shard):
            self.close()
            self._file = file = stored.shard.open("rb", buffering=0)
        wanted = stored.num_bytes - start if num_bytes is None else num_bytes
        file.seek(stored.offset + start)
        data = bytearray(wanted)
        view = memoryview(data)
        while view:
            count = file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{stored.shard}: ends inside {name}; {_ADVICE}")
            view = view[count:]
        return data

    def verify(self) -> None:
        """Raises CheckpointError where a shard is not what it was when it was opened."""
        for shard in self._stamps:
            self._check(shard)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check(self, shard: Path) -> None:
        before = self._stamps[shard]
        try:
            now = Stamp.of(shard)
        except OSError as error:
            raise CheckpointError(f"{shard}: {os.strerror(error.errno or 0)}; {_ADVICE}") from error
        if now != before:
            raise CheckpointError(f"{shard}: changed while the checkpoint was read; {_ADVICE}")


_ADVICE = "start again once nothing writes to the checkpoint"
