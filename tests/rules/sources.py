"""The package's source files, parsed once per test session."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tercel"


@dataclass(frozen=True)
class Source:
    path: Path

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The top-level package or module below tercel; empty for tercel itself."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 1 else ""

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_test(self) -> bool:
        return self.path.name.startswith("test_")

    @property
    def is_kernel(self) -> bool:
        return self.path.name.startswith("kernel_")

    def imports(self) -> set[str]:
        """Dotted names of everything imported anywhere in the file."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        return names


SOURCES = [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]
HOST = [source for source in SOURCES if not source.is_test]
OP_FOLDERS = sorted(
    path.parent for path in PACKAGE.glob("ops/*/*/__init__.py") if path.parent.name != "_lib"
)
