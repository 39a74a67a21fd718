"""A directory of safetensors files: what it holds, what is wrong with it, its tensors."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tercel.errors import CheckpointError
from tercel.weights.header import StoredTensor, read_header
from tercel.weights.problems import Problem
from tercel.weights.reader import Reader, Stamp

INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model directory by name; opening reads headers only."""

    path: Path
    shards: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    """By position: shards in order, tensors as they lie in them."""
    unreadable: frozenset[str]
    """Tensors that the index puts into files that are missing or have no readable header."""
    all_known: bool
    """Whether the index, or else the headers of all files, say which tensors there should be."""
    damaged: frozenset[Path]
    """Shards whose tensors cannot be read, some or all of them."""
    problems: tuple[Problem, ...]
    """What is wrong with the files; whoever loads reports it with what else is wrong."""
    stamps: Mapping[Path, Stamp]
    """Of every shard that there is, from before its header was read."""

    @classmethod
    def open(cls, model_dir: Path | str, option: str = "model") -> "Checkpoint":
        """Reads the index, where there is one, and the header of every shard of a directory that
        `option` names.

        Raises:
            CheckpointError: no directory, or no safetensors file in it. Anything else that is wrong
                is in `problems`.
        """
        path = Path(model_dir)
        if not path.is_dir():
            raise CheckpointError(
                f"{option}: {path} is not a directory; pass a checkpoint directory"
            )
        index, problems = _read_index(path)
        shards = _shards(path, index)
        if not shards:
            raise CheckpointError(
                f"{option}: {path} holds no safetensors file; download the weights"
            )
        gaps = _missing_numbers(shards) if index is None else []
        problems += gaps
        tensors, damaged, unreadable = [], set(), set()
        stamps = {shard: Stamp.of(shard) for shard in shards if shard.is_file()}
        for shard in shards:
            found, wrong = read_header(shard) if shard in stamps else ([], [_missing(shard)])
            tensors += found
            problems += wrong
            if wrong:
                damaged.add(shard)
            if wrong and not found:
                unreadable.add(shard.name)
        problems += _duplicates(tensors)
        lost: frozenset[str] = frozenset()
        if index is not None:
            lost = frozenset(key for key, file in index.weight_map.items() if file in unreadable)
            problems += _compare(index, tensors, lost)
        by_name = {tensor.name: tensor for tensor in tensors}
        known = index is not None or not (gaps or unreadable)
        return cls(path, shards, by_name, lost, known, frozenset(damaged), tuple(problems), stamps)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def reader(self) -> "Reader":
        return Reader(self.tensors, self.stamps)


def _read_index(path: Path) -> tuple[_Index | None, list[Problem]]:
    file = path / INDEX
    if not file.is_file():
        return None, []
    try:
        index = msgspec.json.decode(file.read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError) as error:
        return None, [Problem(INDEX, None, f"is not a valid index: {error}")]
    odd = sorted({name for name in index.weight_map.values() if Path(name).name != name})
    if odd:
        return None, [Problem(INDEX, None, f"names a file outside the directory: {odd[0]!r}")]
    return index, []


def _shards(path: Path, index: _Index | None) -> tuple[Path, ...]:
    if index is not None:
        return tuple(path / name for name in sorted(set(index.weight_map.values())))
    single = path / "model.safetensors"
    return (single,) if single.is_file() else tuple(sorted(path.glob("*.safetensors")))


def _missing(shard: Path) -> Problem:
    return Problem(shard.name, None, f"is missing, {INDEX} names it; download it")


def _missing_numbers(shards: Iterable[Path]) -> list[Problem]:
    """Gaps in model-00001-of-00003.safetensors and so on."""
    problems = []
    matches = [match for shard in shards if (match := _NUMBERED.match(shard.name))]
    for stem, count in sorted({(match["stem"], match["count"]) for match in matches}):
        there = {int(match["number"]) for match in matches if match["stem"] == stem}
        for number in sorted({*range(1, int(count) + 1)} - there):
            name = f"{stem}-{number:05d}-of-{count}.safetensors"
            problems.append(Problem(name, None, "is missing, its siblings count it; download it"))
    return problems


def _duplicates(tensors: list[StoredTensor]) -> list[Problem]:
    counts = Counter(tensor.name for tensor in tensors)
    return [
        Problem(tensor.shard.name, tensor.name, "is in more than one file")
        for tensor in tensors
        if counts[tensor.name] > 1
    ]


def _compare(
    index: _Index, tensors: list[StoredTensor], unreadable: frozenset[str]
) -> list[Problem]:
    """Where the index and the headers disagree."""
    stored = {(tensor.name, tensor.shard.name) for tensor in tensors}
    problems = [
        Problem(file, key, f"is missing, {INDEX} says it is here")
        for key, file in index.weight_map.items()
        if key not in unreadable and (key, file) not in stored
    ]
    problems += [
        Problem(tensor.shard.name, tensor.name, f"is here, but not according to {INDEX}")
        for tensor in tensors
        if index.weight_map.get(tensor.name) != tensor.shard.name
    ]
    total, declared = sum(item.num_bytes for item in tensors), index.metadata.get("total_size")
    if declared is not None and not unreadable and declared != total:
        text = f"metadata.total_size is {declared}, the files hold {total} bytes of tensors"
        problems.append(Problem(INDEX, None, text))
    return problems
