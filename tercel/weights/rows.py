"""What a table of weights is made of: rows and the checkpoint tensors that they stack.

A row says how one weight of one rank is made: each source is viewed, cut to the rank's part of one
dimension, and written below the one before it. Rows hang in nodes, which become the dataclasses of
tercel.core.parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tercel.core.layout import Axis, Layout
from tercel.errors import ConfigError
from tercel.weights.transforms import View, as_stored

_FLOATS = ("BF16", "F32", "F16")


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor, or one per expert: then `key` holds `{expert}`."""

    key: str
    shape: tuple[int, ...]
    """As published."""
    dtype: str
    """As published."""
    axis: Axis | None = None
    """What divides dimension `dim` among ranks; None: every rank holds all of it."""
    dim: int = 0
    """Of the view."""
    view: View = as_stored
    used: int | None = None
    """The tensor may have any shape: its first `used` values count, the rest must be zero."""
    block_scale: "Source | None" = None
    """What the blocks of an FP8 matrix are multiplied with on loading."""

    @property
    def allowed(self) -> tuple[str, ...]:
        """Stored dtypes that become this one without a second thought."""
        return _FLOATS if self.dtype in _FLOATS else (self.dtype,)

    def stored(self) -> "Iterator[Source]":
        """The tensors of the checkpoint that this one is made of."""
        yield self
        if self.block_scale is not None:
            yield self.block_scale


@dataclass(frozen=True)
class Row:
    sources: tuple[Source, ...]
    dtype: torch.dtype | None = None
    """None: the activation dtype."""
    num_experts: int | None = None
    """Experts to stack in a leading dimension; None: no such dimension."""
    unread: tuple[Source, ...] = ()
    """What may lie beside the sources and is counted, not loaded."""

    def stored(self) -> Iterator[tuple[str, Source]]:
        """(key, tensor) of every checkpoint tensor that the row reads over all ranks."""
        return self._every(part for source in self.sources for part in source.stored())

    def beside(self) -> Iterator[tuple[str, Source]]:
        """(key, tensor) of every tensor that the row has and does not read."""
        return self._every(self.unread)

    def _every(self, sources: Iterable[Source]) -> Iterator[tuple[str, Source]]:
        sources = tuple(sources)
        for expert in range(self.num_experts or 1):
            for source in sources:
                yield source.key.format(expert=expert), source


@dataclass(frozen=True)
class Node:
    """A dataclass of tercel.core.parameters whose tensors are rows."""

    type: type
    fields: "Mapping[str, Row | Node | tuple[Node, ...] | None]"

    def rows(self, path: str = "") -> Iterator[tuple[str, Row]]:
        """(dotted field path, row) in the order of the fields."""
        for name, child in self.fields.items():
            if isinstance(child, Row):
                yield path + name, child
            elif isinstance(child, Node):
                yield from child.rows(f"{path}{name}.")
            elif child is not None:
                for index, node in enumerate(child):
                    yield from node.rows(f"{path}{name}.{index}.")

    def map(self, change: Callable[[Row], Row]) -> "Node":
        """The same node with every row changed."""
        return Node(
            self.type, {name: _mapped(child, change) for name, child in self.fields.items()}
        )


def _mapped(child: Any, change: Callable[[Row], Row]) -> Any:
    if isinstance(child, Row):
        return change(child)
    if isinstance(child, Node):
        return child.map(change)
    return child


@dataclass(frozen=True)
class Place:
    """Whose part of the weights: the rank of a layout."""

    layout: Layout
    rank: int

    def cut(self, source: Source, stored: torch.Tensor) -> torch.Tensor:
        """This rank's part of a stored tensor, as a view."""
        view = source.view(stored)
        if source.axis is None:
            return view
        index, count = self.layout.part(source.axis, self.rank)
        size, odd = divmod(view.shape[source.dim], count)
        if odd:
            raise ConfigError(
                f"layout {self.layout.name}: {source.key} {list(stored.shape)} does not divide "
                f"by {count} ({source.axis})"
            )
        return view.narrow(source.dim, index * size, size)

    def indices(self, source: Source) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows [...] and columns [C] of a stored matrix this rank's part [..., C] holds."""
        rows, columns = source.shape
        row_of = self.cut(source, torch.arange(rows)[:, None].expand(rows, columns))
        column_of = self.cut(source, torch.arange(columns).expand(rows, columns))
        return row_of[..., 0], column_of[(0,) * (column_of.dim() - 1)]

    def experts(self, row: Row) -> range:
        """This rank's experts of a row; one nameless one where the row has none."""
        if row.num_experts is None:
            return range(1)
        return self.layout.local_range(Axis.EXPERTS, self.rank, row.num_experts)

    def shape(self, row: Row) -> tuple[int, ...]:
        """This rank's shape of a row."""
        parts = [
            self.cut(source, torch.empty(source.shape, device="meta")).shape
            for source in row.sources
        ]
        stacked = (sum(part[0] for part in parts), *parts[0][1:])
        return stacked if row.num_experts is None else (len(self.experts(row)), *stacked)


def matrix(key: str, rows: int, columns: int, axis: Axis | None = None, dim: int = 0) -> Source:
    """A bf16 matrix in nn.Linear layout; dim 0 divides its outputs, dim 1 its inputs."""
    return Source(f"{key}.weight", (rows, columns), "BF16", axis, dim)
