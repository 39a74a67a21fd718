"""What an implementation launches, and when each launch lets the next one start."""

import ast
import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tests.rules.kernel_lints import TRIGGERS, calls_of, is_wait, kernels, name_of

Kernels = Mapping[str, ast.FunctionDef]


def launches(
    run: Callable[..., Any], arguments: Mapping[str, Any], monkeypatch: Any
) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """(kernel's function, its arguments by name) of every launch in one call, none of which runs;
    `arguments` are on meta."""
    from triton.runtime.jit import KernelInterface

    found = []

    def noted(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            signature = inspect.signature(kernel.fn)
            own = {name: value for name, value in options.items() if name in signature.parameters}
            found.append((kernel.fn, dict(signature.bind_partial(*args, **own).arguments)))

        return launch

    with monkeypatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", noted)
        run(**arguments)
    return found


def helpers(trees: Mapping[str, ast.Module], module: str) -> dict[str, ast.FunctionDef]:
    """Kernels that a module's kernels can call, by the name that they have there; its own too."""
    found: dict[str, ast.FunctionDef] = {}
    for node in trees[module].body:
        if isinstance(node, ast.ImportFrom) and node.module in trees:
            there = helpers(trees, node.module)
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            taken = {name: there[given] for name, given in names.items() if given in there}
            found = found | (there if taken else {}) | taken
    return found | {kernel.name: kernel for kernel in kernels(trees[module])}


def triggers_early(kernel: ast.FunctionDef, helpers: Kernels, known: Mapping[str, Any]) -> bool:
    """Whether it lets the next launch start, or a program of it ends, before it waits for the
    previous one, with arguments of `known` values. One that neither waits nor triggers is an
    ordinary launch, which does not."""
    helpers = {name: each for name, each in helpers.items() if each.name != kernel.name}
    kernel = _Known(known).visit(copy.deepcopy(kernel))
    calls = calls_of(kernel)
    waits = [_end(call) for call in calls if is_wait(call, helpers)]
    starts = [_end(call) for call in calls if name_of(call) in TRIGGERS]
    starts += [
        _end(call)
        for call in calls
        if (helper := helpers.get(name_of(call)))
        and triggers_early(helper, helpers, _passed(call, helper, known))
    ]
    if waits:
        starts += [_end(node) for node in ast.walk(kernel) if isinstance(node, ast.Return)]
    return bool(starts) and (not waits or min(starts) < min(waits))


class _Known(ast.NodeTransformer):
    """Without the branches that the values of arguments rule out."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {"__builtins__": {}, **values}

    def visit_If(self, node: ast.If) -> Any:
        try:
            taken = bool(eval(ast.unparse(node.test), self._values))
        except Exception:  # not known, or of tensors
            return self.generic_visit(node)
        return [self.visit(each) for each in (node.body if taken else node.orelse)] or ast.Pass()


def _passed(call: ast.Call, helper: ast.FunctionDef, known: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a helper whose values are known."""
    names = [argument.arg for argument in helper.args.args]
    given = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    values = {name: value.value for name, value in given if isinstance(value, ast.Constant)}
    named = {name: value.id for name, value in given if isinstance(value, ast.Name)}
    return values | {name: known[own] for name, own in named.items() if own in known}


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset
