"""Which kernels a function of the package launches, and when those let the next launch start."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache

from tests.rules.kernel_lints import TRIGGERS, calls_of, is_wait, kernels, name_of

Place = tuple[str, str]
"""Module and name."""
Kernels = Mapping[str, ast.FunctionDef]


class Launches:
    """What the modules `trees` launch."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._trees = trees
        self._kernels = cache(lambda module: {each.name: each for each in kernels(trees[module])})
        self._imports = cache(self._imported)

    def early(self, module: str, name: str) -> dict[str, bool]:
        """Kernels that `module`'s function or class `name` can launch, those that it or what it
        calls names outside of kernels, and which of them trigger early."""
        found: dict[str, bool] = {}
        seen: set[Place] = set()
        todo = [(module, name)]
        while todo:
            home, name = place = todo.pop()
            if place in seen or home not in self._trees:
                continue
            seen.add(place)
            definition = self._definition(home, name)
            if name in self._kernels(home):
                kernel = self._kernels(home)[name]
                found[f"{home}.{name}"] = triggers_early(kernel, self._helpers(home))
            elif definition is not None:
                todo += self._named(home, definition)
            elif name in self._imports(home):
                todo.append(self._imports(home)[name])
        return found

    def _helpers(self, module: str) -> dict[str, ast.FunctionDef]:
        """Kernels that a module's kernels can call, by the name that they have there."""
        found: dict[str, ast.FunctionDef] = {}
        for name, (home, original) in self._imports(module).items():
            if home in self._trees and original in self._kernels(home):
                found = self._helpers(home) | found | {name: self._kernels(home)[original]}
        return found | self._kernels(module)

    def _definition(self, module: str, name: str) -> ast.AST | None:
        for node in self._trees[module].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                return node.value
        return None

    def _named(self, module: str, definition: ast.AST) -> Iterator[Place]:
        """What a definition names, where this is known."""
        imports = self._imports(module)
        for node in ast.walk(definition):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield ".".join(imports.get(node.value.id, ())), node.attr
            elif isinstance(node, ast.Name):
                yield imports.get(node.id, (module, node.id))

    def _imported(self, module: str) -> dict[str, Place]:
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in self._trees[module].body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }


def triggers_early(kernel: ast.FunctionDef, helpers: Kernels) -> bool:
    """Whether it lets the next launch start, or a program of it ends, before it waits for the
    previous one. One that neither waits nor triggers is an ordinary launch, which does not."""
    helpers = {name: each for name, each in helpers.items() if each is not kernel}
    calls = calls_of(kernel)
    waits = [_end(call) for call in calls if is_wait(call, helpers)]
    starts = [_end(call) for call in calls if name_of(call) in TRIGGERS]
    starts += [
        _end(call)
        for call in calls
        if name_of(call) in helpers and triggers_early(helpers[name_of(call)], helpers)
    ]
    if waits:
        starts += [_end(node) for node in ast.walk(kernel) if isinstance(node, ast.Return)]
    return bool(starts) and (not waits or min(starts) < min(waits))


def _end(node: ast.expr | ast.Return) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0
