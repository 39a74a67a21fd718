"""Kernels of the dense ops on a GPU, beyond their cells: no row depends on those around it, scratch
memory is written before it is read, results repeat, ragged shapes are right."""

import pytest
import torch

from tercel.contract import Arg, Cell
from tercel.contract.bench import bench_of
from tercel.contract.check import check_cell
from tercel.contract.contract import ACTIVATIONS
from tercel.contract.draw import draw
from tercel.ops.catalog import catalog

pytestmark = pytest.mark.gpu

CATEGORIES = ("gemm", "norm", "activation", "sampling")
KERNELS = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for path, op in catalog().items()
    if path.split("/")[0] in CATEGORIES
    for name in op.implementations
    if name in ("triton", "gluon")
]
MOST_BYTES = 200 << 20
RAGGED = [
    Cell("ragged", T=tokens, K=depth, M=columns, sigmoid_from=columns // 2, spare=spare)
    for tokens in (1, 2, 7, 8, 9, 16, 17, 64)
    for depth, columns, spare in ((328, 37, 3), (768, 200, 8), (7168, 61, 0), (4096, 3001, 0))
]


RAGGED_GLU = [
    Cell("ragged", T=tokens, K=depth, I=width, activation=activation, spare=8)
    for tokens in (1, 7, 16, 64)
    for depth, width, activation in ((328, 19, "silu"), (4096, 1501, "situ"), (7168, 61, "silu"))
]


def rows_axis(op) -> str:
    return "T" if "T" in op.contract.axes else "S"


def cells(op):
    """Of the contract and the bench, with several rows and of moderate size."""
    axis = rows_axis(op)
    for cell in (*op.contract.cells, *bench_of(op).cells):
        sizes = [size for size in cell.sizes.values() if isinstance(size, int) and size > 0]
        if cell[axis] >= 2 and torch.Size(sizes[:3]).numel() * 2 < MOST_BYTES:
            yield cell


def results(op, name, arguments):
    """What the op returns and what it writes; the arguments stay as they are."""
    written = {
        key: arguments[key].clone()
        for key, spec in op.contract.args.items()
        if isinstance(spec, Arg) and spec.written and arguments[key] is not None
    }
    returned = op.using(name)(**{**arguments, **written})
    if not op.contract.returns:
        return written
    returned = returned if isinstance(returned, tuple) else (returned,)
    return dict(zip(op.contract.returns, returned, strict=True)) | written


@pytest.mark.parametrize(("op", "name"), KERNELS)
def test_rows_do_not_depend_on_their_neighbours(op, name):
    axis, seen = rows_axis(op), 0
    for cell in cells(op):
        arguments = draw(op, cell, dtype=torch.bfloat16, device="cuda")
        before = results(op, name, arguments)
        for key, spec in op.contract.args.items():
            value = arguments[key]
            if not isinstance(spec, Arg) or axis not in spec.axes or value is None:
                continue
            if value.dtype in ACTIVATIONS:
                rest = value.narrow(spec.axes.index(axis), 1, cell[axis] - 1)
                rest.copy_(torch.rand_like(rest) + 0.5)
        after = results(op, name, arguments)
        for key in before:
            axes = {**op.contract.args, **op.contract.returns}[key].axes
            first = [value[key].select(axes.index(axis), 0) for value in (before, after)]
            assert torch.equal(*first), f"{cell} {key}"
        seen += 1
    assert seen


@pytest.mark.parametrize(("op", "name"), KERNELS)
def test_scratch_is_written_before_it_is_read(op, name, monkeypatch):
    def poisoned(function):
        def empty(*args, **kwargs):
            made = function(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(1)

        return empty

    for cell in cells(op):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", poisoned(torch.empty))
            patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
            check_cell(op, cell, name, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(("op", "name"), KERNELS)
def test_results_repeat(op, name):
    for cell in cells(op):
        arguments = draw(op, cell, dtype=torch.bfloat16, device="cuda")
        first = results(op, name, arguments)
        for _ in range(8):
            again = results(op, name, arguments)
            assert all(torch.equal(again[key], value) for key, value in first.items()), str(cell)


@pytest.mark.parametrize("name", ["gluon", "triton"])
@pytest.mark.parametrize("cell", RAGGED, ids=str)
def test_gemv_of_ragged_shapes(cell, name):
    gemv = catalog()["gemm/gemv"]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_cell(gemv, cell, name, dtype=dtype, device="cuda")


@pytest.mark.parametrize("name", ["gluon", "triton"])
@pytest.mark.parametrize("cell", RAGGED_GLU, ids=str)
def test_gemv_glu_of_ragged_shapes(cell, name):
    gemv_glu = catalog()["gemm/gemv_glu"]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_cell(gemv_glu, cell, name, dtype=dtype, device="cuda")
