"""Whether two processes see the same checkpoint, without reading all of it."""

import hashlib
from pathlib import Path

from tercel.weights.checkpoint import Checkpoint

_WHOLE_BYTES = 16 << 20
"""Files up to this size are read whole."""
_SAMPLES = 64
_SAMPLE_BYTES = 16 << 10


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of every tensor's name, shape, dtype and place, and of every file: whole where it is
    small, else samples. Another training of the same model has another one, whatever the files'
    dates and directories are."""
    digest = hashlib.sha256()
    for tensor in checkpoint.tensors.values():
        listed = (tensor.name, tensor.shape, tensor.dtype, tensor.shard.name, tensor.start)
        digest.update(repr(listed).encode())
    for shard in checkpoint.shards:
        if shard.is_file():
            _sample(shard, digest)
    return digest.hexdigest()


def file_hash(*files: Path) -> str:
    """Of the files' whole contents; a missing one counts as such."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes() if file.is_file() else b"missing")
    return digest.hexdigest()


def _sample(shard: Path, digest: "hashlib._Hash") -> None:
    size = shard.stat().st_size
    digest.update(str(size).encode())
    with shard.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
            return
        for sample in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
