"""A cell's inputs: random numbers, in the layouts that the contract allows."""

import hashlib
from typing import Any

import torch

from tercel.contract.contract import DTYPES, Arg, Cell
from tercel.contract.op import Op

GAP = 16
"""Elements beside a row; rows start at multiples of it, as columns of a wider product do."""


class Maker:
    """Draws a cell's inputs on `device`, from a seed that is stable across processes."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        generator = torch.Generator(self.device).manual_seed(seed)
        self._drawn: dict[str, Any] = {"generator": generator, "device": self.device}

    def _to(self, value: torch.Tensor, dtype: str) -> torch.Tensor:
        return value.to(self.device, self.dtype if dtype == "act" else DTYPES[dtype])

    def normal(self, *shape: int, scale: float = 1.0, dtype: str = "act") -> torch.Tensor:
        values = torch.randn(shape, dtype=torch.float64, **self._drawn)
        return self._to(values * scale, dtype)

    def uniform(self, *shape: int, low: float, high: float, dtype: str = "act") -> torch.Tensor:
        values = torch.rand(shape, dtype=torch.float64, **self._drawn)
        return self._to(low + (high - low) * values, dtype)

    def integers(self, *shape: int, low: int, high: int, dtype: str = "i64") -> torch.Tensor:
        """low .. high - 1."""
        return self._to(torch.randint(low, high, shape, **self._drawn), dtype)

    def choice(self, count: int, *, low: int, high: int) -> torch.Tensor:
        """`count` different integers of low .. high - 1, in random order, i64."""
        return torch.randperm(high - low, **self._drawn)[:count] + low

    def poison(self, *shape: int, dtype: str = "act") -> torch.Tensor:
        """Memory that nobody has written: NaN."""
        return self._to(torch.full(shape, float("nan"), device=self.device), dtype)


def stable_seed(*parts: object) -> int:
    """A seed from a stable hash: Python's own changes with every process."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def draw(
    op: Op[..., Any], cell: Cell, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """One valid set of arguments for `cell`, after the op's own validity check. Where the contract
    lets rows lie apart, they do."""
    maker = Maker(stable_seed(op.name, cell, seed), dtype, device)
    arguments = op.arguments(**op.contract.inputs(cell, maker))
    for name, spec in op.contract.args.items():
        if isinstance(spec, Arg) and spec.layout != "contiguous" and not spec.written:
            arguments[name] = with_gaps(arguments[name])
    op.contract.bind(arguments)
    if op.contract.valid is not None:
        op.contract.valid(**arguments)
    return arguments


def with_gaps(value: torch.Tensor | None) -> torch.Tensor | None:
    """The same values as columns of wider rows, poison on both sides: what the caller of an op
    has of a fused product, or of a table. A tensor that is not contiguous is one already."""
    if value is None or not value.is_contiguous():
        return value
    columns = value if value.dim() > 1 else value.unsqueeze(-1)
    count = columns.shape[-1]
    shape = (*columns.shape[:-1], GAP + -(-count // GAP) * GAP + GAP)
    poison = float("nan") if value.is_floating_point() else -1
    inner = value.new_full(shape, poison)[..., GAP : GAP + count]
    return inner.copy_(columns) if value.dim() > 1 else inner.copy_(columns)[:, 0]
