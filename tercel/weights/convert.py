"""Converts a checkpoint between formats, a few matrices in memory at a time, all or nothing."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tercel.core.drafter_formats import is_drafter
from tercel.core.model import ModelConfig, read_config_json
from tercel.errors import CheckpointError, ConfigError
from tercel.weights.checkpoint import INDEX, Checkpoint
from tercel.weights.conversion_plan import Copy, Job, Plan, plan_conversion
from tercel.weights.formats import MATRIX_FORMATS
from tercel.weights.manifest import account
from tercel.weights.problems import raise_problems
from tercel.weights.published import published_config
from tercel.weights.quantization import with_mxfp4, with_nvfp4, without_quantization
from tercel.weights.reader import Reader
from tercel.weights.requantize import Exactness, Tensors, requantize
from tercel.weights.shards import Piece, whole, write_json, write_shards
from tercel.weights.staging import staged

_COPIED_BYTES = 64 * 2**20
"""Bytes of an unchanged tensor that are in memory at a time."""
_REWRITTEN = {"config.json", "hf_quant_config.json", INDEX}


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    tensors: int
    num_bytes: int
    copied_tensors: int
    copied_bytes: int
    exactness: tuple[Exactness, ...]
    """One per kind of matrix that changed its format."""
    files: tuple[str, ...]
    """What was copied beside the tensors."""


def convert_checkpoint(
    source: Path,
    target: Path,
    to: str,
    *,
    fp8_attention: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes the checkpoint `source` as `target` with its routed experts in another format.

    Everything is written to a directory beside `target`, which is renamed at the end and removed
    on any failure; what a killed conversion to `target` has left is removed first.
    Memory holds the matrices of half an expert, or one matrix, at a time.

    Args:
        to: mxfp4, nvfp4 or bf16.
        fp8_attention: with nvfp4, also store the attention projections as FP8 in blocks, as the
            published NVFP4 checkpoint does; otherwise they stay as they are, and become bf16 in
            the other formats, which are published so.
        progress: called with (bytes written, bytes in all).

    Raises:
        ConfigError: an unknown format, nothing to convert, a target that is in the way, or another
            conversion that writes to it now.
        CheckpointError: what is wrong with the source, that it changed meanwhile, or that the
            target cannot be written.
    """
    _check_paths(source, target)
    config_json = read_config_json(source, "source")
    if is_drafter(config_json):
        raise ConfigError(
            f"source: {source} is a drafter, which runs in bf16 and has no experts to convert; "
            "pass the directory of its target"
        )
    config = ModelConfig.from_dict(config_json)
    checkpoint = Checkpoint.open(source, "source")
    raise_problems(source, account(checkpoint, config)[1])
    plan = plan_conversion(checkpoint, config, to, fp8_attention)
    _check_space(target, plan.num_bytes)
    reader = checkpoint.reader()
    writing = _Writing(plan, reader, progress or (lambda done, total: None))
    with staged(target, f"converting {source}") as staging:
        write_shards(
            staging, [(shard.planned, writing.pieces(shard.jobs)) for shard in plan.shards]
        )
        files = _copy_files(source, staging)
        for name, value in _configs(config_json, plan, to).items():
            write_json(staging / name, value)
        reader.verify()
    copies = [job for shard in plan.shards for job in shard.jobs if isinstance(job, Copy)]
    return Conversion(
        plan.num_tensors,
        plan.num_bytes,
        len(copies),
        sum(copy.stored.num_bytes for copy in copies),
        tuple(writing.exactness[key] for key in sorted(writing.exactness)),
        files,
    )


@dataclass
class _Writing:
    """Turns jobs into the bytes of what they write, and adds up what that lost."""

    plan: Plan
    reader: Reader
    progress: Callable[[int, int], None]
    exactness: dict[tuple[str, str, str], Exactness] = field(default_factory=dict)
    done: int = 0

    def pieces(self, jobs: tuple[Job | Copy, ...]) -> Iterator[Piece]:
        for job in jobs:
            for piece in self._copied(job) if isinstance(job, Copy) else self._converted(job):
                yield piece
                self.done += piece[2].nbytes
                self.progress(self.done, self.plan.num_bytes)

    def _copied(self, copy: Copy) -> Iterator[Piece]:
        name, size = copy.stored.name, copy.stored.num_bytes
        for start in range(0, size, _COPIED_BYTES):
            data = self.reader.read(name, start, min(_COPIED_BYTES, size - start))
            yield name, start, memoryview(data)

    def _converted(self, job: Job) -> Iterator[Piece]:
        path = (job.kind, job.source, job.target)
        exactness = self.exactness.setdefault(path, Exactness(*path))
        stored = {key: self._tensors(key, job.source) for key in job.keys}
        for key, tensors in requantize(stored, job.source, job.target, exactness).items():
            for leaf, tensor in tensors.items():
                yield whole(f"{key}.{leaf}", tensor)

    def _tensors(self, key: str, form: str) -> Tensors:
        parts = MATRIX_FORMATS[form].read
        return {part.leaf: self.reader.tensor(f"{key}.{part.leaf}") for part in parts}


def _configs(config_json: Mapping[str, Any], plan: Plan, to: str) -> dict[str, Any]:
    """config.json, and what else declares the format, as it is published."""
    if to == "nvfp4":
        config, quantization = with_nvfp4(config_json, plan.quantized)
        return {"config.json": config, "hf_quant_config.json": quantization}
    if to == "mxfp4":
        published = published_config("kimi_k3_mxfp4")["text_config"]["quantization_config"]
        return {"config.json": with_mxfp4(config_json, published)}
    return {"config.json": without_quantization(config_json)}


def _check_paths(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(f"source: {source} is not a directory; pass a checkpoint directory")
    paths = source.resolve(), target.resolve()
    if paths[0] == paths[1]:
        raise ConfigError(f"out: {target} is the source itself; choose another directory")
    if paths[0] in paths[1].parents or paths[1] in paths[0].parents:
        raise ConfigError(f"out: {target} and {source} lie in each other; choose another directory")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"out: {target} exists and is not an empty directory; choose another")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"out: {target.parent} is not a directory; create it first")


def _check_space(target: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(target.resolve().parent).free
    if free < num_bytes:
        raise CheckpointError(
            f"{target} needs {num_bytes:,} bytes and its disk has {free:,} free; make room or "
            "choose another"
        )


def _copy_files(source: Path, staging: Path) -> tuple[str, ...]:
    """Tokenizer, generation settings and the like: every file that is not about the weights."""
    names = sorted(
        path.name
        for path in source.iterdir()
        if path.is_file() and path.suffix != ".safetensors" and path.name not in _REWRITTEN
    )
    for name in names:
        shutil.copyfile(source / name, staging / name)
    return tuple(names)
