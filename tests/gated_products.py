"""What holds for every op that activates one half of a product and multiplies it by the other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tercel.contract import Cell, Op
from tercel.contract.check import (
    check_cell,
    check_control,
    check_meta,
    check_refusal,
    check_replay,
    check_roundings,
)
from tests.interpreter import implementations


class GatedProduct:
    """Tests of `op`, which a class in the op's own test sets."""

    op: Op[..., Any]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Over the op's fastest plain form and its kernel, and over its cells."""
        if "implementation" in metafunc.fixturenames:
            metafunc.parametrize("implementation", implementations(self.op))
        if "cell" in metafunc.fixturenames:
            metafunc.parametrize("cell", self.op.contract.cells, ids=str)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_cells(self, cell: Cell, dtype: torch.dtype, implementation: str) -> None:
        check_cell(self.op, cell, implementation, dtype=dtype)

    def test_ordered(self, cell: Cell) -> None:
        check_cell(self.op, cell, "ordered", dtype=torch.float32)

    def test_activation_reads_the_rounded_products(self, implementation: str) -> None:
        check_roundings(self.op, self.op.contract.cells[0], implementation)

    def test_meta(self) -> None:
        check_meta(self.op, self.op.contract.cells[1], self.op.portable.name)

    def test_replay(self, implementation: str) -> None:
        check_replay(self.op, self.op.contract.cells[1], implementation)

    @pytest.mark.parametrize(
        ("change", "names"),
        [
            (lambda a: a.update(weight=a["weight"][:-1]), "weight"),
            (lambda a: a.update(activation="gelu"), "activation"),
            (lambda a: a.update(activation="situ", beta=None), "beta"),
        ],
        ids=["odd number of rows", "unknown activation", "no beta"],
    )
    def test_refuses(self, change: Callable[[dict[str, Any]], None], names: str) -> None:
        cell = self.op.contract.cells[1]
        assert names in str(check_refusal(self.op, cell, self.op.portable.name, change))

    @pytest.mark.parametrize(
        "pairs",
        [
            lambda weight: weight.roll(len(weight) // 2, 0),
            lambda weight: torch.cat([weight[::2], weight[1::2]]),
        ],
        ids=["halves exchanged", "rows in turn"],
    )
    def test_control_pairs_other_rows(self, pairs: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def broken(x: torch.Tensor, weight: torch.Tensor, **activation: Any) -> Any:
            return self.op(x, pairs(weight), **activation)

        check_control(self.op, self.op.contract.cells[1], broken)
