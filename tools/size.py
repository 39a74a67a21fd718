"""Lines per package, code apart from tests: `make size`."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]


def docstring_lines(tree: ast.Module) -> int:
    """Lines that are text of the module, its classes, functions and fields."""
    return sum(
        node.end_lineno - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def count(path: Path) -> tuple[int, int, int]:
    """(lines, code lines, longest function) of a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    blank = sum(not line.strip() or line.strip().startswith("#") for line in lines)
    longest = max(
        (
            node.end_lineno - node.lineno + 1
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        default=0,
    )
    return len(lines), len(lines) - blank - docstring_lines(tree), longest


def main() -> int:
    groups: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for path in sorted(ROOT.glob("tercel/**/*.py")):
        parts = path.relative_to(ROOT).parts
        name = "/".join(parts[:2]) if len(parts) > 2 else "tercel"
        groups["op tests" if path.name.startswith("test_") else name].append(count(path))
    groups["tests"] = [count(path) for path in sorted(ROOT.glob("tests/**/*.py"))]
    table = Table("package", "files", "lines", "code", "largest file", "longest function")
    for name, files in groups.items():
        lines, code = sum(f[0] for f in files), sum(f[1] for f in files)
        largest, longest = max(f[0] for f in files), max(f[2] for f in files)
        table.add_row(name, *map(str, (len(files), lines, code, largest, longest)))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
