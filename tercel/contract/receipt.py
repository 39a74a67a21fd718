"""Receipts: what a machine found when it certified an implementation, and whether it still holds.

A receipt is keyed by implementation, architecture and world size and names a content hash: the
syntax trees, comments and docstrings aside, of every module of this package that the
implementation, its reference, its contract and the check code import, directly or not. Status is
computed from it, never written down.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tercel.contract.op import Op
from tercel.core.arch import Arch

PACKAGE = "tercel"
CHECK_MODULES = ("tercel.contract.check", "tercel.contract.compare")


class Status(StrEnum):
    CERTIFIED = "certified"
    """Checked on this architecture, and nothing it depends on has changed since."""
    STALE = "stale"
    """Checked, but something it depends on has changed."""
    COMPILED = "compiled"
    """Cross-compiled for this architecture and never run on it."""
    UNTESTED = "untested"


class ResultError(msgspec.Struct, frozen=True):
    """The distance of one result in bf16 from the fp64 reference, beside the tolerance."""

    element_ulps: float
    element_allowed: float
    rms_ulps: float
    rms_allowed: float

    @property
    def share(self) -> float:
        """How much of its tolerance it takes; 0 for integers, which are equal."""
        pairs = ((self.element_ulps, self.element_allowed), (self.rms_ulps, self.rms_allowed))
        return max((error / allowed if error else 0.0) for error, allowed in pairs)


class CellTime(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call inside a CUDA graph, inputs not in L2, beside others timed in the same rounds."""

    median_us: float
    low_us: float
    """Tenth percentile."""
    high_us: float
    """Ninetieth percentile."""
    bytes: int
    """What the contract says that the call must move."""
    flops: int
    baselines_us: Mapping[str, float] = {}
    """Medians of other code for the same arguments."""
    peers_us: Mapping[str, float] = {}
    """Medians of public kernels."""
    not_run: Mapping[str, str] = {}
    """Peers that are absent, and why."""


class CellResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One certified cell."""

    cell: str
    errors: Mapping[str, ResultError] = {}
    """Per result and written argument."""
    time: CellTime | None = None
    """Of the cells of the op's bench."""


class Ceilings(msgspec.Struct, frozen=True):
    """What the device did at best in the same run."""

    copy_bytes_per_s: float
    """Read plus written, of a large copy."""
    read_bytes_per_s: float
    """Of a large sum."""
    bf16_flops_per_s: float
    """Of a large product."""


class Receipt(msgspec.Struct, frozen=True):
    """Written by `tercel certify`, never by hand."""

    op: str
    implementation: str
    arch: Arch
    world_size: int
    content_hash: str
    ran: bool
    """False: the implementation was compiled for `arch` and not run."""
    device: str
    versions: Mapping[str, str]
    """Tool versions and driver: recorded, not hashed."""
    cells: tuple[CellResult, ...]
    ceilings: Ceilings | None = None
    command: str = ""
    date: str = ""


def receipts_of(op: Op[..., Any]) -> tuple[Receipt, ...]:
    """The receipts that lie in the op's folder."""
    path = receipts_path(op)
    return msgspec.json.decode(path.read_bytes(), type=tuple[Receipt, ...]) if path.exists() else ()


def receipts_path(op: Op[..., Any]) -> Path:
    """Where the op's receipts lie."""
    spec = importlib.util.find_spec(op.folder)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{op.folder} has no folder")
    return Path(spec.origin).with_name("receipts.json")


def write_receipts(op: Op[..., Any], new: Iterable[Receipt]) -> None:
    """Adds `new` to the op's folder; each replaces the one of its implementation, architecture
    and world size."""
    held = {_key(receipt): receipt for receipt in (*receipts_of(op), *new)}
    ordered = [held[key] for key in sorted(held)]
    text = msgspec.json.format(msgspec.json.encode(ordered), indent=1)
    receipts_path(op).write_bytes(text + b"\n")


def _key(receipt: Receipt) -> tuple[str, Arch, int]:
    return receipt.implementation, receipt.arch, receipt.world_size


def status(
    op: Op[..., Any],
    implementation: str,
    arch: Arch,
    *,
    world_size: int = 1,
    receipts: Iterable[Receipt] | None = None,
) -> Status:
    """Whether `implementation` is trusted on `arch`; `receipts` default to those in the folder."""
    held = receipts_of(op) if receipts is None else receipts
    matching = [receipt for receipt in held if _key(receipt) == (implementation, arch, world_size)]
    if not matching:
        return Status.UNTESTED
    current = content_hash(op, implementation)
    fresh = [receipt for receipt in matching if receipt.content_hash == current]
    if any(receipt.ran for receipt in fresh):
        return Status.CERTIFIED
    return Status.COMPILED if fresh else Status.STALE


def content_hash(op: Op[..., Any], implementation: str) -> str:
    """The hash that a receipt of `implementation` must carry to be current."""
    roots = [
        op.implementation(implementation).run.__module__,
        op.implementation("reference").run.__module__,
        f"{op.folder}.contract",
        *CHECK_MODULES,
    ]
    digest = hashlib.sha256()
    for module in sorted(import_closure(roots)):
        digest.update(module.encode())
        digest.update(_syntax(module).encode())
    return digest.hexdigest()


def import_closure(roots: Iterable[str]) -> set[str]:
    """`roots` and every module of this package that they import, directly or not."""
    found: set[str] = set()
    waiting = [root for root in roots if root.startswith(PACKAGE)]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [name for name in _imports(module) if name not in found]
    return found


@cache
def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{module} has no source file")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


@cache
def _syntax(module: str) -> str:
    """The module's syntax tree without docstrings; comments and layout are not part of a tree."""
    tree = ast.parse(ast.unparse(_tree(module)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            node.body = [item for item in node.body if not _is_text(item)] or [ast.Pass()]
    return _text(tree)


def _text(part: Any) -> str:
    """Like ast.dump, but alike in every version of Python: fields that a later one has added are
    empty in this source, and empty fields are left out."""
    if isinstance(part, list):
        return f"[{', '.join(map(_text, part))}]"
    if not isinstance(part, ast.AST):
        return repr(part)
    filled = [(name, value) for name, value in ast.iter_fields(part) if value not in (None, [])]
    return f"{type(part).__name__}({', '.join(f'{name}={_text(value)}' for name, value in filled)})"


def _is_text(node: ast.stmt) -> bool:
    """A docstring of a module, class, function or field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def _imports(module: str) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name for name in submodules if _is_module(name)] or [node.module]
    return tuple(name for name in names if name.split(".")[0] == PACKAGE)


@cache
def _is_module(name: str) -> bool:
    if not name.startswith(PACKAGE):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
