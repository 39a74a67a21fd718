"""What a table of weights is made of: rows, the checkpoint tensors they stack, formats of matrices.

A row says how one weight of one rank is made: each source is viewed, cut to the rank's part of one
dimension, and written below the one before it. Rows hang in nodes, which become the dataclasses of
tercel.core.parameters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tercel.core.layout import Axis, Layout
from tercel.errors import ConfigError
from tercel.weights.transforms import View, as_stored


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


@dataclass(frozen=True)
class Row:
    sources: tuple[Source, ...]
    dtype: torch.dtype | None = None
    """None: the activation dtype."""
    num_experts: int | None = None
    """Experts to stack in a leading dimension; None: no such dimension."""

    @property
    def allowed(self) -> tuple[str, ...]:
        """Stored dtypes that become this row's without a second thought."""
        return ("U8",) if self.dtype is torch.uint8 else ("BF16", "F32", "F16")

    def stored(self) -> Iterator[tuple[str, Source]]:
        """(key, source) of every checkpoint tensor that the row reads over all ranks."""
        for expert in range(self.num_experts or 1):
            for source in self.sources:
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


@dataclass(frozen=True)
class Stored:
    """How one tensor of a matrix [rows, columns] lies in the checkpoint."""

    leaf: str
    """Last part of its name."""
    dtype: str
    columns: int
    """Columns of the matrix per element."""
    row_dtype: torch.dtype | None
    """Row.dtype of the weight that it becomes."""


MATRIX_FORMATS: Mapping[str, Mapping[str, Stored]] = {
    "plain": {"": Stored("weight", "BF16", 1, None)},
    "mxfp4": {
        "": Stored("weight_packed", "U8", 2, torch.uint8),
        "_scale": Stored("weight_scale", "U8", 32, torch.uint8),
    },
}
"""Format -> suffix of the target field -> stored tensor."""


def matrix_format(key: str, names: Mapping[str, Any]) -> str:
    """The format of the matrix `key`, read from the tensors that there are, not from the config."""
    return "mxfp4" if f"{key}.weight_packed" in names else "plain"


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


def stored_part(source: Source, stored: Stored) -> Source:
    """The part of a matrix that one stored tensor of its format holds."""
    rows, columns = source.shape
    key = source.key.removesuffix("weight") + stored.leaf
    return replace(source, key=key, shape=(rows, columns // stored.columns), dtype=stored.dtype)
