"""Which tensors of a checkpoint change with its format, and what is written where."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.formats import MATRIX_FORMATS, matrix_format
from tercel.weights.header import StoredTensor
from tercel.weights.manifest import family_of_checkpoint
from tercel.weights.quantization import ATTENTION, ROUTED, Matrix, matrices
from tercel.weights.shards import Planned

FORMATS: Mapping[str, str] = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "bf16": "plain"}
"""What a checkpoint can be converted to -> format of its routed experts."""


@dataclass(frozen=True)
class Job:
    """Matrices that are converted together: gate and up of an expert, or one."""

    kind: str
    source: str
    target: str
    matrices: tuple[Matrix, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(matrix.key for matrix in self.matrices)

    @property
    def planned(self) -> Iterator[Planned]:
        for matrix in self.matrices:
            for part in MATRIX_FORMATS[self.target].stored:
                yield Planned(f"{matrix.key}.{part.leaf}", part.dtype, part.shape(*matrix.shape))


@dataclass(frozen=True)
class Copy:
    """A tensor that stays as it is."""

    stored: StoredTensor

    @property
    def planned(self) -> Iterator[Planned]:
        yield Planned(self.stored.name, self.stored.dtype, self.stored.shape)


@dataclass(frozen=True)
class Shard:
    """One file to write: what the tensors of one source file become."""

    jobs: tuple[Job | Copy, ...]

    @property
    def planned(self) -> tuple[Planned, ...]:
        return tuple(tensor for job in self.jobs for tensor in job.planned)


@dataclass(frozen=True)
class Plan:
    checkpoint: Checkpoint
    shards: tuple[Shard, ...]
    quantized: tuple[Matrix, ...]
    """Matrices that are not plain in the result."""
    num_tensors: int
    num_bytes: int


def plan_conversion(
    checkpoint: Checkpoint, config: ModelConfig, to: str, fp8_attention: bool
) -> Plan:
    """Raises ConfigError where `to` is unknown or would change nothing."""
    if to not in FORMATS:
        raise ConfigError(f"to: {to!r} is unknown; there is {', '.join(FORMATS)}")
    if fp8_attention and to != "nvfp4":
        raise ConfigError(f"fp8-attention: is published with nvfp4 only, not with {to}")
    dtypes = {name: stored.dtype for name, stored in checkpoint.tensors.items()}
    every = tuple(matrices(config, family_of_checkpoint(checkpoint)))
    formats: dict[str, tuple[str, str]] = {}
    for matrix in every:
        source = matrix_format(matrix.key, dtypes)
        formats[matrix.key] = source, _target(matrix.kind, source, to, fp8_attention)
    if all(source == target for source, target in formats.values()):
        raise ConfigError(f"to: {checkpoint.path} is {to} already")
    shards = tuple(
        Shard(tuple(jobs)) for jobs in _jobs(checkpoint, every, formats).values() if jobs
    )
    planned = [tensor for shard in shards for tensor in shard.planned]
    return Plan(
        checkpoint,
        shards,
        tuple(matrix for matrix in every if formats[matrix.key][1] != "plain"),
        len(planned),
        sum(tensor.num_bytes for tensor in planned),
    )


def _target(kind: str, source: str, to: str, fp8_attention: bool) -> str:
    if kind == ROUTED:
        return FORMATS[to]
    if kind == ATTENTION and fp8_attention:
        return "fp8_block"
    return source if to == "nvfp4" else "plain"


def _jobs(
    checkpoint: Checkpoint, every: tuple[Matrix, ...], formats: Mapping[str, tuple[str, str]]
) -> dict[Path, list[Job | Copy]]:
    """The work of each source file, in the order of its tensors. Matrices that are converted
    together go where the first of them lies."""
    groups = _together(every)
    jobs: dict[Path, list[Job | Copy]] = {shard: [] for shard in checkpoint.shards}
    planned: set[str] = set()
    for stored in checkpoint.tensors.values():
        key = stored.name.rpartition(".")[0]
        source, target = formats.get(key, ("", ""))
        if source == target:
            jobs[stored.shard].append(Copy(stored))
        elif key not in planned:
            group = groups[key]
            planned.update(matrix.key for matrix in group)
            jobs[stored.shard].append(Job(group[0].kind, source, target, group))
    return jobs


def _together(every: tuple[Matrix, ...]) -> dict[str, tuple[Matrix, ...]]:
    """Matrix key -> what it is converted with: kernels multiply with an expert's gate and up at
    once, so NVFP4 gives them one second scale."""
    by_key = {matrix.key: matrix for matrix in every}
    groups = {}
    for key, matrix in by_key.items():
        parent, _, name = key.rpartition(".")
        pair = name in ("w1", "w3") and matrix.kind == ROUTED
        names = (f"{parent}.w1", f"{parent}.w3") if pair else (key,)
        groups[key] = tuple(by_key[each] for each in names)
    return groups
