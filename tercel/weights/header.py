"""The header of a safetensors file, checked against the size of the file.

A file is: u64 length of the header, little-endian; the header, a JSON object of tensor name to
dtype, shape and byte range; the data, which the ranges cover without holes or overlaps.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from tercel.weights.problems import Problem

DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    "F4": 4,
}
TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Of the tensors that the model reads."""
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint; nothing of its data has been read."""

    name: str
    shard: Path
    dtype: str
    """As safetensors spells it: BF16, F32, U8, ..."""
    shape: tuple[int, ...]
    start: int
    """First byte after the header."""
    num_bytes: int
    offset: int
    """First byte in the file."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(shard: Path) -> tuple[list[StoredTensor], list[Problem]]:
    """The tensors of one file by position, and what is wrong with it.

    A cut file still lists its tensors; a file without a readable header lists none.
    """
    try:
        with shard.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                cause = f"its header is cut or damaged ({size} bytes in the file)"
                return [], [_damaged(shard, cause)]
            entries = _parse(file.read(length))
    except OSError as error:
        return [], [Problem(shard.name, None, f"cannot be read: {error.strerror}")]
    except msgspec.MsgspecError as error:
        return [], [_damaged(shard, f"its header is not valid: {error}")]
    tensors = [
        StoredTensor(
            name,
            shard,
            entry.dtype,
            tuple(entry.shape),
            begin,
            end - begin,
            _LENGTH_BYTES + length + begin,
        )
        for name, entry in entries.items()
        for begin, end in [entry.data_offsets]
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.num_bytes))
    problems = [problem for tensor in tensors for problem in _check_tensor(tensor)]
    return tensors, problems or _check_ranges(shard, tensors, size - _LENGTH_BYTES - length)


def _parse(header: bytes) -> dict[str, _Entry]:
    values = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    values.pop("__metadata__", None)
    return {name: msgspec.json.decode(raw, type=_Entry) for name, raw in values.items()}


def _check_tensor(tensor: StoredTensor) -> list[Problem]:
    bits = DTYPE_BITS.get(tensor.dtype)
    if bits is None:
        text = f"dtype {tensor.dtype} is unknown"
    elif min(tensor.shape, default=0) < 0 or tensor.start < 0:
        text = f"shape {list(tensor.shape)} or position {tensor.start} is negative"
    elif tensor.num_bytes * 8 != math.prod(tensor.shape) * bits:
        text = f"{tensor.num_bytes} bytes do not hold {tensor.dtype} {list(tensor.shape)}"
    else:
        return []
    return [Problem(tensor.shard.name, tensor.name, f"the header is wrong: {text}")]


def _check_ranges(shard: Path, tensors: list[StoredTensor], data_bytes: int) -> list[Problem]:
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            text = f"the header is wrong: data starts at {tensor.start}, expected {end}"
            return [Problem(shard.name, tensor.name, text)]
        end += tensor.num_bytes
    if data_bytes < end:
        return [_damaged(shard, f"truncated: {data_bytes} of {end} bytes of data")]
    if data_bytes > end:
        return [_damaged(shard, f"{data_bytes - end} bytes after the last tensor")]
    return []


def _damaged(shard: Path, cause: str) -> Problem:
    return Problem(shard.name, None, f"{cause}; download it again")
