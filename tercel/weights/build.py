"""Makes the dataclasses of one rank out of a table: allocates, fills slice by slice, packs."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch

from tercel.core import fp8
from tercel.core.layout import Layout
from tercel.errors import ConfigError
from tercel.weights.checkpoint import Checkpoint
from tercel.weights.header import StoredTensor
from tercel.weights.random import random_tensor
from tercel.weights.reader import Reader
from tercel.weights.rows import Node, Place, Row, Source

Packs = Mapping[str, Callable[[Any], Any]]
"""`MoeWeights.experts` and the like -> what turns that field into the form its kernel reads.

A pack gets this rank's value of the field and returns its replacement; the value is freed then.
"""


class Progress(Protocol):
    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Called after every tensor, with bytes of this rank's weights before packing."""


Fill = Callable[[Mapping[str, torch.Tensor], Mapping[str, Row]], None]


class Build:
    """Allocates, has filled, and packs the dataclasses of one rank."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        packs: Packs,
    ) -> None:
        if not 0 <= rank < layout.world_size:
            raise ConfigError(f"rank: {rank} is outside the {layout.world_size} of {layout.name}")
        self.place = Place(layout, rank)
        self._dtype, self._device, self._packs = dtype, device, packs

    def load(self, table: Node, checkpoint: Checkpoint, progress: Progress | None) -> Fill:
        """Fills tensors of `table` from the files, in the order in which they lie there."""
        total = sum(self._empty(row, torch.device("meta")).nbytes for _, row in table.rows())
        reader, done = checkpoint.reader(), 0

        def fill(tensors: Mapping[str, torch.Tensor], rows: Mapping[str, Row]) -> None:
            nonlocal done
            pieces = [
                piece
                for path, row in rows.items()
                for piece in _pieces(tensors[path], row, self.place, checkpoint.tensors)
            ]
            for piece in sorted(pieces, key=lambda piece: piece.position):
                piece.read(reader, self.place)
                done += piece.target.nbytes
                if progress is not None:
                    progress(done, total)
            reader.verify()

        return fill

    def draw(self, seed: int) -> Fill:
        """Fills tensors at random."""
        generator = torch.Generator(self._device).manual_seed(seed)

        def fill(tensors: Mapping[str, torch.Tensor], rows: Mapping[str, Row]) -> None:
            for path, tensor in tensors.items():
                tensor.copy_(random_tensor(path, tuple(tensor.shape), tensor.dtype, generator))

        return fill

    def model(self, table: Node, fill: Fill, **given: Any) -> Any:
        """The dataclass of `table`, its layers one after the other; fields that the table does not
        have are `given`."""
        layers = table.fields["layers"]
        assert isinstance(layers, tuple)
        outer = Node(table.type, {**table.fields, "layers": ()})
        built = tuple(self._node(layer, fill) for layer in layers)
        return self._assemble(outer, self._filled(outer, fill), layers=built, **given)

    def _node(self, node: Node, fill: Fill) -> Any:
        return self._assemble(node, self._filled(node, fill))

    def _filled(self, node: Node, fill: Fill) -> dict[str, torch.Tensor]:
        rows = dict(node.rows())
        tensors = {path: self._empty(row, self._device) for path, row in rows.items()}
        fill(tensors, rows)
        return tensors

    def _assemble(
        self, node: Node, tensors: dict[str, torch.Tensor], path: str = "", **given: Any
    ) -> Any:
        """Takes the tensors out of the dict, so that a pack's input is freed with it."""
        values = dict(given)
        for name, child in node.fields.items():
            if name in given:
                continue
            if isinstance(child, Row):
                value: Any = tensors.pop(path + name)
            elif isinstance(child, Node):
                value = self._assemble(child, tensors, f"{path}{name}.")
            else:
                value = child
            pack = self._packs.get(f"{node.type.__name__}.{name}")
            values[name] = value if pack is None or value is None else pack(value)
            del value
        return node.type(**values)

    def _empty(self, row: Row, device: torch.device) -> torch.Tensor:
        return torch.empty(self.place.shape(row), dtype=row.dtype or self._dtype, device=device)


_FP32_ROWS = 1024
"""Rows of an FP8 matrix that are in memory as fp32 at a time."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One stored tensor and the part of a weight that its slice fills."""

    stored: StoredTensor
    source: Source
    target: torch.Tensor
    block_scale: StoredTensor | None

    @property
    def position(self) -> tuple[str, int]:
        return str(self.stored.shard), self.stored.start

    def read(self, reader: Reader, place: Place) -> None:
        """Copies this rank's slice."""
        name, cut = self.stored.name, partial(place.cut, self.source)
        if self.block_scale is None:
            reader.copy(name, cut, self.target)
            return
        scale = reader.tensor(self.block_scale.name)
        rows, columns = place.indices(self.source)
        part = reader.tensor(name, cut)
        for start in range(0, len(part), _FP32_ROWS):
            at = slice(start, start + _FP32_ROWS)
            self.target[at].copy_(fp8.dequantize(part[at], scale, rows[at], columns))


def _pieces(
    out: torch.Tensor, row: Row, place: Place, tensors: Mapping[str, StoredTensor]
) -> Iterator[_Piece]:
    heights = [
        place.cut(source, torch.empty(source.shape, device="meta")).shape[0]
        for source in row.sources
    ]
    starts = [0, *itertools.accumulate(heights)]
    for slot, expert in enumerate(place.experts(row)):
        target = out if row.num_experts is None else out[slot]
        for source, start, height in zip(row.sources, starts, heights, strict=False):
            stored, *scales = (tensors[part.key.format(expert=expert)] for part in source.stored())
            piece = target.narrow(0, start, height)
            yield _Piece(stored, source, piece, scales[0] if scales else None)


def check_packs(packs: Packs, parameters: ModuleType) -> None:
    """Raises ConfigError for a pack of a field that no dataclass of `parameters` has."""
    known = {
        f"{name}.{item.name}"
        for name, kind in vars(parameters).items()
        if name.endswith("Weights")
        for item in fields(kind)
    }
    for name in packs:
        if name not in known:
            raise ConfigError(f"packs: {name!r} names no field of {parameters.__name__}")
