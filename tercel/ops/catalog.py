"""Every op of the package, found by folder."""

import importlib
from pathlib import Path
from typing import Any

from tercel.contract import Op


def catalog() -> dict[str, Op[..., Any]]:
    """Op by `category/name`, in order of name."""
    root = Path(__file__).parent
    folders = sorted(path.parent for path in root.glob("*/*/op.py"))
    ops = {}
    for folder in folders:
        category, name = folder.parts[-2:]
        module = importlib.import_module(f"tercel.ops.{category}.{name}.op")
        ops[f"{category}/{name}"] = getattr(module, name)
    return ops
