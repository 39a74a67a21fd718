"""Accounts for every tensor of a checkpoint: which field it becomes, or why it is not loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tercel.core.model import ModelConfig
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.formats import matrix_format
from tercel.weights.header import DTYPE_BITS, StoredTensor
from tercel.weights.problems import Problem
from tercel.weights.quantization import declared_format
from tercel.weights.rows import Node, Source
from tercel.weights.table import KIMI_K3, KIMI_LINEAR, NOT_LOADED, UNREAD, Family, model_table
from tercel.weights.vision import vision_sources


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    field: str | None
    """Field of ModelWeights, e.g. layers.3.attention.proj; None: not loaded."""
    part: str
    """text model, vision tower, vision projector, activation scales."""
    used: int | None = None
    """Leading values that are not padding; None: all."""


@dataclass(frozen=True)
class Manifest:
    entries: tuple[Entry, ...]

    @property
    def num_tensors(self) -> int:
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def by(self, attribute: str) -> dict[str, dict[str, int]]:
        """Tensors and bytes per value of `dtype`, `part`, ..., largest first."""
        totals: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            group = totals.setdefault(getattr(entry, attribute), {"tensors": 0, "bytes": 0})
            group["tensors"] += 1
            group["bytes"] += entry.num_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]["bytes"]))


def manifest_from_config(config_json: Mapping[str, Any]) -> Manifest:
    """The tensors that a published checkpoint with this config.json holds.

    Kimi-Linear's small tensors (convolutions, A_log, dt_bias, o_norm) are stored in bf16 or fp32
    depending on the release; the table's choice is counted here, and the header decides on loading.

    Raises:
        ConfigError: the config cannot run, or declares an unknown quantization.
    """
    config = ModelConfig.from_dict(config_json)
    table = model_table(config, family_of_config(config_json), declared_format(config_json))
    entries = [
        _entry(key, source, ", ".join(fields) or None, "text model" if fields else UNREAD)
        for key, (source, fields) in expected(table).items()
    ]
    for part, source in vision_sources(config_json.get("vision_config")):
        entries.append(_entry(source.key, source, None, part))
    return Manifest(tuple(entries))


def family_of_config(config_json: Mapping[str, Any]) -> Family:
    """K3 wraps its text model's config, Kimi-Linear does not."""
    return KIMI_K3 if "text_config" in config_json else KIMI_LINEAR


def family_of_checkpoint(checkpoint: Checkpoint) -> Family:
    names = {*checkpoint.tensors, *checkpoint.unreadable}
    wrapped = any(name.startswith(KIMI_K3.prefix) for name in names)
    return KIMI_K3 if wrapped else KIMI_LINEAR


def checkpoint_table(
    checkpoint: Checkpoint, config: ModelConfig, layers: range | None = None
) -> Node:
    """The table whose key prefix and matrix formats are those of the tensors that there are."""
    dtypes: dict[str, str | None] = dict.fromkeys(checkpoint.unreadable)
    dtypes |= {name: stored.dtype for name, stored in checkpoint.tensors.items()}
    family = family_of_checkpoint(checkpoint)
    return model_table(config, family, lambda key: matrix_format(key, dtypes), layers)


def account(checkpoint: Checkpoint, config: ModelConfig) -> tuple[Manifest, list[Problem]]:
    """The manifest of what is there, and everything that is wrong with it.

    Reads no data but the tensors that are padded, to see that the padding is zero.
    """
    fields, problems = check_tensors(checkpoint, checkpoint_table(checkpoint, config))
    entries = []
    for stored in checkpoint.tensors.values():
        field = fields.get(stored.name)
        part = UNREAD if field == "" else _part(stored.name)
        if part == "text model" and field is None:
            problems.append(Problem(stored.shard.name, stored.name, "is not a tensor of the model"))
        key, shape, dtype = stored.name, stored.shape, stored.dtype
        entries.append(Entry(key, shape, dtype, stored.num_bytes, field or None, part))
    return Manifest(tuple(entries)), problems


def check_tensors(checkpoint: Checkpoint, table: Node) -> tuple[dict[str, str], list[Problem]]:
    """By tensor that the table knows and that is there: the fields that it becomes, empty where it
    is not read; and what is wrong with the files and with these tensors."""
    wanted = expected(table)
    problems = list(checkpoint.problems)
    reported = {problem.key for problem in problems}
    fields: dict[str, str] = {}
    sound: dict[str, Source] = {}
    for key, (source, paths) in wanted.items():
        stored = checkpoint.tensors.get(key)
        if stored is None:
            if paths and checkpoint.all_known and key not in {*checkpoint.unreadable, *reported}:
                text = f"is missing, {', '.join(paths)} needs it"
                problems.append(Problem(str(checkpoint.path), key, text))
            continue
        fields[key] = ", ".join(paths)
        wrong = _mismatches(stored, source)
        problems += wrong
        if not wrong and stored.name not in reported:
            sound[key] = source
    problems += _padding(checkpoint, sound)
    return fields, problems


def expected(table: Node) -> dict[str, tuple[Source, list[str]]]:
    """Every key that the table knows: how it is stored, and which fields it becomes, if any."""
    wanted: dict[str, tuple[Source, list[str]]] = {}
    for path, row in table.rows():
        for key, source in row.stored():
            wanted.setdefault(key, (source, []))[1].append(path)
        for key, source in row.beside():
            wanted.setdefault(key, (source, []))
    return wanted


def _part(key: str) -> str:
    return next(
        (part for prefix, part in NOT_LOADED.items() if key.startswith(prefix)), "text model"
    )


def _mismatches(stored: StoredTensor, source: Source) -> list[Problem]:
    file, key = stored.shard.name, stored.name
    problems = []
    if source.used is not None:
        if math.prod(stored.shape) < source.used:
            text = f"has shape {list(stored.shape)}, expected at least {source.used} values"
            problems.append(Problem(file, key, text))
    elif stored.shape != source.shape:
        text = f"has shape {list(stored.shape)}, expected {list(source.shape)}"
        problems.append(Problem(file, key, text))
    if stored.dtype not in source.allowed:
        text = f"has dtype {stored.dtype}, expected {' or '.join(source.allowed)}"
        problems.append(Problem(file, key, text))
    return problems


def _padding(checkpoint: Checkpoint, sound: Mapping[str, Source]) -> list[Problem]:
    """Tensors whose values after the used ones are not all zero."""
    padded = [
        stored
        for key, source in sound.items()
        if source.used is not None
        and math.prod((stored := checkpoint.tensors[key]).shape) > source.used
    ]
    reader, problems = checkpoint.reader(), []
    for stored in sorted(padded, key=lambda item: item.shard):
        used = sound[stored.name].used
        if (
            stored.shard not in checkpoint.damaged
            and reader.tensor(stored.name).flatten()[used:].any()
        ):
            text = f"its values past the first {used} are padding and must be zero"
            problems.append(Problem(stored.shard.name, stored.name, text))
    return problems


def _entry(key: str, source: Source, field: str | None, part: str) -> Entry:
    num_bytes = math.prod(source.shape) * DTYPE_BITS[source.dtype] // 8
    return Entry(key, source.shape, source.dtype, num_bytes, field, part, source.used)
