"""What one rank of a layout reads of a published checkpoint, and of a drafter for it, from the
configurations alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tercel.core.drafter import DrafterConfig
from tercel.core.layout import Axis, Layout
from tercel.core.model import ModelConfig
from tercel.errors import ConfigError
from tercel.weights.drafter_table import Names, check_drafter_layout, drafter_table
from tercel.weights.header import DTYPE_BITS
from tercel.weights.manifest import family_of_config
from tercel.weights.quantization import declared_format
from tercel.weights.rows import Place, Row, Source
from tercel.weights.table import model_table


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One tensor, or one of each of the rank's experts, as far as the rank reads it."""

    field: str
    """Field of ModelWeights that it becomes; `drafter.` and a field of DrafterWeights."""
    key: str
    num_tensors: int
    num_bytes: int
    dtype: str
    num_copies: int
    """Ranks of the stage that read the same."""

    @property
    def group(self) -> str:
        """The field without its layer and last name: attention, mlp.experts, embed, ..."""
        names = [name for name in self.field.split(".") if not name.isdigit() and name != "layers"]
        return ".".join(names[:-1]) or names[0]

    @property
    def sharing(self) -> str:
        return "divided" if self.num_copies == 1 else "replicated"


@dataclass(frozen=True)
class RankManifest:
    layers: range
    """Of the rank's pipeline stage."""
    entries: tuple[RankEntry, ...]

    @property
    def num_tensors(self) -> int:
        """Of the checkpoint: one that two fields are made of counts once."""
        return sum({entry.key: entry.num_tensors for entry in self.entries}.values())

    @property
    def num_bytes(self) -> int:
        """Read, which is what the weights take where they are kept as they are stored."""
        return sum(entry.num_bytes for entry in self.entries)

    def by(self, attribute: str) -> dict[str, dict[str, int]]:
        """Tensors and bytes per value of `group`, `dtype` or `sharing`, largest first."""
        groups: dict[str, list[RankEntry]] = {}
        for entry in self.entries:
            groups.setdefault(getattr(entry, attribute), []).append(entry)
        parts = {name: RankManifest(self.layers, tuple(group)) for name, group in groups.items()}
        largest_first = sorted(parts.items(), key=lambda item: -item[1].num_bytes)
        return {
            name: {"tensors": part.num_tensors, "bytes": part.num_bytes}
            for name, part in largest_first
        }


def rank_manifest(
    config_json: Mapping[str, Any], layout: Layout, rank: int, drafter: DrafterConfig | None = None
) -> RankManifest:
    """The part of a checkpoint with this config.json that `rank` reads, and of a drafter that has
    the target's embedding: the rank's own rows, which the last of several stages reads again.

    Raises:
        ConfigError: the layout does not divide the model or drafter, or has no such rank.
    """
    config = ModelConfig.from_dict(config_json)
    layout.check(config)
    if not 0 <= rank < layout.world_size:
        raise ConfigError(f"rank: {rank} is outside the {layout.world_size} of {layout.name}")
    layers = layout.stage_layers(rank, config.num_hidden_layers)
    formats = declared_format(config_json)
    family = family_of_config(config_json)
    rows = list(model_table(config, family, formats, layers).rows())
    if drafter is not None and layers.stop == config.num_hidden_layers:
        check_drafter_layout(drafter, layout)
        drafts = list(drafter_table(drafter, Names()).rows())
        if layers.start > 0:
            first = model_table(config, family, formats, range(1)).rows()
            drafts += [(path, row) for path, row in first if path == "embed"]
        rows += [(f"drafter.{path}", row) for path, row in drafts]
    entries = [
        _entry(path, row, source, Place(layout, rank))
        for path, row in rows
        for whole in row.sources
        for source in whole.stored()
    ]
    return RankManifest(layers, tuple(entries))


def _entry(path: str, row: Row, source: Source, place: Place) -> RankEntry:
    part = place.cut(source, torch.empty(source.shape, device="meta"))
    count = len(place.experts(row))
    num_bytes = math.prod(part.shape) * DTYPE_BITS[source.dtype] // 8
    copies = num_copies(row, source, place.layout)
    return RankEntry(path, source.key, count, count * num_bytes, source.dtype, copies)


def num_copies(row: Row, source: Source, layout: Layout) -> int:
    """How many ranks of a stage read the same part of a stored tensor."""
    parts = {
        (
            None if source.axis is None else layout.part(source.axis, rank),
            None if row.num_experts is None else layout.part(Axis.EXPERTS, rank),
        )
        for rank in range(layout.tp)
    }
    return layout.tp // len(parts)
