"""Every op folder is complete, and its parts agree."""

import ast
import importlib
import inspect
import re

import pytest
import torch

from tercel.contract import Arg, Op
from tercel.contract.draw import draw
from tercel.contract.op import Deferred
from tests.rules.sources import OP_FOLDERS, ROOT

REQUIRED = ("__init__.py", "contract.py", "reference.py", "op.py")
TOGETHER = ("bench.py", "receipts.json")


def load(folder) -> Op:
    module = ".".join(folder.relative_to(ROOT).parts)
    return getattr(importlib.import_module(f"{module}.op"), folder.name)


def parameters(run) -> list[str] | None:
    """Of an implementation, None where it passes on what it gets; a kernel's are read, since its
    language may not be installed."""
    if isinstance(run, Deferred):
        return written_parameters(run.__module__, run.__name__)
    found = inspect.signature(run).parameters
    passes_on = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in found.values())
    return None if passes_on else list(found)


def written_parameters(module: str, name: str) -> list[str]:
    """Of a function where it is defined, or imported from."""
    path = ROOT / (module.replace(".", "/") + ".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return parameters_left(module, node.value)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return written_parameters(node.module, alias.name)
    raise AssertionError(f"{module} has no function {name}")


def parameters_left(module: str, call: ast.expr) -> list[str]:
    """Of partial(function, name=value, ...)."""
    assert isinstance(call, ast.Call) and ast.unparse(call.func) == "partial"
    given = {keyword.arg for keyword in call.keywords}
    names = written_parameters(module, ast.unparse(call.args[0]))
    return [name for name in names if name not in given]


@pytest.mark.parametrize("folder", OP_FOLDERS, ids=lambda path: path.name)
class TestFolder:
    def test_is_complete(self, folder):
        missing = [name for name in REQUIRED if not (folder / name).is_file()]
        if not (folder / f"test_{folder.name}.py").is_file():
            missing.append(f"test_{folder.name}.py")
        assert missing == []

    def test_kernel_bench_and_receipts_all_or_none(self, folder):
        has_kernel = any(folder.glob("kernel_*.py"))
        assert [(folder / name).is_file() for name in TOGETHER] == [has_kernel] * len(TOGETHER)

    def test_every_kernel_is_an_implementation(self, folder):
        languages = {path.stem.removeprefix("kernel_") for path in folder.glob("kernel_*.py")}
        assert languages <= set(load(folder).implementations)

    def test_implementations_repeat_the_signature(self, folder):
        op = load(folder)
        for implementation in op.implementations.values():
            names = parameters(implementation.run)
            assert names in (None, list(op.signature.parameters)), implementation.name

    def test_contract_is_documented(self, folder):
        op = load(folder)
        module = importlib.import_module(f"{op.folder}.contract")
        assert module.__doc__ and "Source:" in module.__doc__
        assert op.__doc__ and "Args:" in op.__doc__

    def test_cells_say_why(self, folder):
        cells = load(folder).contract.cells
        assert cells
        assert all(len(cell.why) > 8 for cell in cells)
        assert any(cell.layouts for cell in cells)
        assert len({str(cell) for cell in cells}) == len(cells)

    def test_tolerances_are_derived(self, folder):
        contract = load(folder).contract
        results = [*contract.returns, *contract.written]
        assert all(len(contract.tolerance_of(name).why) > 20 for name in results)

    def test_test_has_a_negative_control_and_refusals(self, folder):
        text = (folder / f"test_{folder.name}.py").read_text(encoding="utf-8")
        for shared in re.findall(r"^from tests\.(\w+) import", text, re.MULTILINE):
            text += (ROOT / f"tests/{shared}.py").read_text(encoding="utf-8")
        assert "check_control" in text and "check_refusal" in text and "check_replay" in text

    def test_axes_are_known(self, folder):
        contract = load(folder).contract
        names = set()
        for arg in [*contract.args.values(), *contract.returns.values()]:
            if isinstance(arg, Arg):
                names |= set(re.findall(r"[A-Za-z_]\w*", arg.shape))
        values = {name for name, arg in contract.args.items() if not isinstance(arg, Arg)}
        assert names <= set(contract.axes) | values


def test_names_follow_the_computation():
    for folder in OP_FOLDERS:
        assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", folder.name)
        assert not folder.name.startswith(("k3_", "kimi_", "fast_"))


@pytest.mark.parametrize("folder", OP_FOLDERS, ids=lambda path: path.name)
def test_every_cell_can_be_recorded(folder):
    """The shape-only form gives what the reference gives, and the cost is known."""
    op = load(folder)
    for cell in op.contract.cells:
        arguments = draw(op, cell, dtype=torch.bfloat16)
        meta = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        _, results, cost = op.record(**meta)
        assert cost.bytes > 0 or 0 in cell.sizes.values()
        names = list(op.contract.returns)
        assert len(names) == (
            0 if results is None else len(results) if isinstance(results, tuple) else 1
        )
