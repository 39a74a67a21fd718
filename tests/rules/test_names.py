"""Words that do not belong in the package."""

import ast
import re

from tests.rules.sources import HOST, ROOT

FORBIDDEN = re.compile(r"\bTODO\b|\bFIXME\b|\bXXX\b|\bHACK\b")
PLACES = re.compile(r"/work/|\bthis session\b|\bhelper session\b")
ENVIRONMENT = {"os.environ", "os.getenv", "environ", "getenv"}


def test_no_leftovers():
    found = [source.module for source in HOST if FORBIDDEN.search(source.text)]
    assert found == []


def test_nothing_speaks_of_where_it_was_written():
    suffixes = {".py", ".md", ".toml", ".json", ".txt", ".yaml", ".sh", ""}
    skipped = {".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if skipped & set(parts) or path.suffix not in suffixes or not path.is_file():
            continue
        if path == ROOT / "tests/rules/test_names.py" or path.stat().st_size > 1 << 20:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if PLACES.search(text):
            found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_no_environment_switches():
    """Behaviour is chosen by configuration. Only launching reads the environment."""
    found = []
    for source in HOST:
        if source.module.startswith("tercel.parallel.launch"):
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ENVIRONMENT:
                found.append(f"{source.module}:{node.lineno}")
    assert found == []


def test_no_module_level_mutable_state():
    """A module-level dict, list or set is a table: it is annotated or upper case and never written
    to by a function of its module."""
    found = []
    for source in HOST:
        tables = {
            target.id
            for node in source.tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Dict | ast.List | ast.Set)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                found.append(f"{source.module}:{node.lineno} global")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                mutates = node.func.attr in (
                    "append",
                    "update",
                    "setdefault",
                    "pop",
                    "clear",
                    "add",
                )
                if mutates and isinstance(owner, ast.Name) and owner.id in tables:
                    found.append(f"{source.module}:{node.lineno} {owner.id}.{node.func.attr}")
    assert found == []
