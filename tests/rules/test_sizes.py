"""Sizes that keep a file readable. Where one makes code worse, an ADR says why."""

import ast

from tests.rules.sources import HOST, SOURCES, Source

FILE_LINES = 400
KERNEL_LINES = 800
REFERENCE_LINES = 500
FUNCTION_LINES = 60
PARAMETERS = 8
CONTRACT_LINES = 160
EXCEPTIONS: dict[str, str] = {}
"""Module to the ADR that allows it."""


def limit(source: Source) -> int:
    if source.is_kernel:
        return KERNEL_LINES
    if source.package == "reference":
        return REFERENCE_LINES
    if source.path.name == "contract.py" and source.package == "ops":
        return CONTRACT_LINES
    return FILE_LINES


def functions(source: Source):
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return node.end_lineno - body[0].lineno + 1 if body else 0


def test_files():
    long = {
        source.module: source.text.count("\n")
        for source in SOURCES
        if source.text.count("\n") > limit(source) and source.module not in EXCEPTIONS
    }
    assert long == {}


def test_functions():
    long = {
        f"{source.module}.{node.name}": code_lines(node)
        for source in HOST
        for node in functions(source)
        if not source.is_kernel and code_lines(node) > FUNCTION_LINES
    }
    assert long == {}


def test_parameters():
    """Ops carry their inputs openly; everything else keeps its parameters few."""
    many = {
        f"{source.module}.{node.name}": len(node.args.args) + len(node.args.kwonlyargs)
        for source in HOST
        if source.package not in ("ops", "contract")
        for node in functions(source)
        if len(node.args.args) + len(node.args.kwonlyargs) > PARAMETERS + 1
    }
    assert many == {}
