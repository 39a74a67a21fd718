"""Reads the tensors of a checkpoint, and refuses files that change while they are read.

Files are read, never mapped: touching a mapped page of a file that was cut meanwhile ends the
process, where a read that comes up short is an error with a name.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from tercel.errors import CheckpointError
from tercel.weights.header import TORCH_DTYPES, StoredTensor
from tercel.weights.transforms import View, as_stored

_CHUNK_BYTES = 1 << 20
"""Of what does not lie as it is wanted: it goes through a buffer that stays in the CPU's cache."""


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
    """Copies tensors out of the shards, one of which is open at a time.

    Every call looks at the shard's stamp first, and `verify` at all of them: a checkpoint that
    changes on the way is a CheckpointError, never a mixture.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], stamps: Mapping[Path, Stamp]) -> None:
        self._tensors = tensors
        self._stamps = stamps
        self._shard: Path | None = None
        self._file: BinaryIO | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def tensor(self, name: str, view: View = as_stored) -> torch.Tensor:
        """What `view` makes of a tensor, in its stored dtype on the CPU."""
        part = self._part(name, view)
        out = torch.empty(part.shape, dtype=part.dtype)
        self._fill(self._tensors[name], part, out)
        return out

    def copy(self, name: str, view: View, target: torch.Tensor) -> None:
        """The same, into `target`, whatever its dtype and device are."""
        self._fill(self._tensors[name], self._part(name, view), target)

    def read(self, name: str, start: int, num_bytes: int) -> bytearray:
        """Bytes `start` to `start + num_bytes` of a tensor."""
        data = bytearray(num_bytes)
        self._read(self._tensors[name], start, memoryview(data))
        return data

    def verify(self) -> None:
        """Raises CheckpointError where a shard is not what it was when it was opened."""
        for shard in self._stamps:
            self._check(shard)

    def _part(self, name: str, view: View) -> torch.Tensor:
        """Where in the stored tensor the part lies: its offset and strides, without memory."""
        stored = self._tensors[name]
        return view(torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], device="meta"))

    def _fill(self, stored: StoredTensor, part: torch.Tensor, target: torch.Tensor) -> None:
        """Reads the bytes from the part's first to its last, those between its rows included: they
        are on the same pages where rows are shorter than these."""
        if not part.numel():
            return
        if _lie_alike(part, target):
            data = target.reshape(-1).view(torch.uint8).numpy().data
            self._read(stored, _start(part), data)
            return
        for rows in _chunks(part):
            piece = part[rows]
            size = part.element_size() * _extent(piece)
            if len(self._buffer) < size:
                self._buffer = torch.empty(size, dtype=torch.uint8)
            buffer = self._buffer[:size]
            self._read(stored, _start(piece), buffer.numpy().data)
            values = buffer.view(part.dtype).as_strided(piece.shape, piece.stride())
            target[rows].copy_(values)

    def _read(self, stored: StoredTensor, start: int, out: memoryview) -> None:
        self._check(stored.shard)
        if self._file is None or stored.shard != self._shard:
            self.close()
            self._file, self._shard = stored.shard.open("rb", buffering=0), stored.shard
        position = stored.offset + start
        while out:
            count = os.preadv(self._file.fileno(), [out], position)
            if not count:
                raise CheckpointError(f"{stored.shard}: ends inside {stored.name}; {_ADVICE}")
            out, position = out[count:], position + count

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


def _lie_alike(part: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the bytes of one are, in their order, the bytes of the other."""
    return (
        part.is_contiguous()
        and target.is_contiguous()
        and part.dtype == target.dtype
        and target.device.type == "cpu"
    )


def _chunks(part: torch.Tensor) -> Iterator[slice | tuple[()]]:
    """Runs of rows that span about _CHUNK_BYTES each."""
    if not part.dim():
        yield ()
        return
    row_bytes = max(1, part.stride(0) * part.element_size())
    rows = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, len(part), rows):
        yield slice(start, start + rows)


def _start(part: torch.Tensor) -> int:
    """Byte of the whole tensor at which a part begins."""
    return int(part.storage_offset()) * part.element_size()


def _extent(part: torch.Tensor) -> int:
    """Elements from the first to the last one, both included."""
    sizes = zip(part.shape, part.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


_ADVICE = "start again once nothing writes to the checkpoint"
