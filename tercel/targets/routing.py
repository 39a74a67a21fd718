"""Which named target serves a configuration: one tree that says what it looked at and why.

A criterion may be read here if it is known when the configuration is, stays constant for the
engine's life and changes the structure of the forward. `explain` replays the same tree.
"""

from dataclasses import dataclass
from typing import Any

from tercel.config import EngineConfig
from tercel.core.arch import Arch
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.errors import NoTarget
from tercel.targets.table import NAMED, TargetRow, generic, portable

K3_SHAPE = (93, 7168, 896, 3584)
"""num_hidden_layers, hidden_size, num_experts, routed_expert_hidden_size."""
KIMI_LINEAR_SHAPE = (27, 2304, 256, 2304)
CHECKPOINTS = {
    (K3_SHAPE, "compressed-tensors"): "kimi_k3_mxfp4",
    (K3_SHAPE, "modelopt_mixed"): "kimi_k3_nvfp4",
    (KIMI_LINEAR_SHAPE, None): "kimi_linear_bf16",
}


@dataclass(frozen=True)
class Line:
    """One decision of the tree."""

    label: str
    value: str
    outcome: str
    """ok, `-> NAME`, or `no match: ...`."""


class Trace:
    """Records what the tree looks at while it decides."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def check(self, label: str, value: Any, ok: bool, expected: str = "") -> bool:
        """Records a criterion that either holds or ends the search."""
        outcome = "ok" if ok else f"no match{': needs ' + expected if expected else ''}"
        self.lines.append(Line(label, str(value), outcome))
        return ok

    def resolve(self, label: str, value: Any, name: str | None, known: str = "") -> str | None:
        """Records a criterion that resolves to a name."""
        outcome = f"-> {name}" if name else f"no match{': known are ' + known if known else ''}"
        self.lines.append(Line(label, str(value), outcome))
        return name

    def __str__(self) -> str:
        return "\n".join(f"{item.label:<12} {item.value:<52} {item.outcome}" for item in self.lines)


@dataclass(frozen=True)
class Question:
    """All that routing may read: the engine and `explain` fill it alike."""

    model: ModelConfig
    config: EngineConfig
    layout: Layout
    arch: Arch | None


@dataclass(frozen=True)
class Route:
    """The row that serves, and the search that led to it."""

    row: TargetRow
    trace: Trace
    nearest: str | None
    """The closest named target that does not serve, with the fields to change."""


def route(question: Question, named: tuple[TargetRow, ...] = NAMED) -> Route:
    """The target of a configuration. Raises NoTarget where `require` finds none."""
    mode, trace = question.config.mode, Trace()
    layout = question.layout.name
    if not trace.check("mode", mode, mode != "off", "auto or require to search for a target"):
        return Route(portable(layout), trace, None)
    row = _search(question, named, trace)
    nearest = _nearest(question, named) if row is None else None
    if row is not None:
        return Route(row, trace, None)
    if mode == "require":
        hint = f"\nnearest: {nearest}" if nearest else "\nno target has this checkpoint's name"
        raise NoTarget(f"mode=require found no named target:\n{trace}{hint}")
    return Route(generic(layout), trace, nearest)


def checkpoint_name(model: ModelConfig) -> str | None:
    """The name of the published checkpoint with this shape and quantization."""
    shape = (model.num_hidden_layers, model.hidden_size, model.num_experts, model.latent_size)
    return CHECKPOINTS.get((shape, model.quant_method))


def _search(question: Question, named: tuple[TargetRow, ...], trace: Trace) -> TargetRow | None:
    model = question.model
    shape = (model.num_hidden_layers, model.hidden_size, model.num_experts, model.latent_size)
    name = checkpoint_name(model)
    if not trace.resolve("checkpoint", f"shape {shape}, {model.quant_method}", name, _names()):
        return None
    rows = [row for row in named if row.checkpoint == name]
    archs = sorted({row.arch for row in rows})
    if not trace.check("arch", question.arch, question.arch in archs, _or(archs)):
        return None
    rows = [row for row in rows if row.arch == question.arch]
    layout = question.layout
    value = f"{layout.name} (expert split {'set' if layout.split_set else 'unset'})"
    layouts = sorted(row.layout for row in rows)
    if not trace.check("layout", value, layout.name in layouts, _or(layouts)):
        return None
    row = next(row for row in rows if row.layout == layout.name)
    if not trace.check("in auto", row.in_auto, row.in_auto or question.config.mode == "require"):
        return None
    trace.resolve("target", row.recipe, row.name)
    return row


def _nearest(question: Question, named: tuple[TargetRow, ...]) -> str | None:
    """The row of this checkpoint that differs in the fewest fields, and which those are."""
    name = checkpoint_name(question.model)
    wanted = {"arch": str(question.arch), "layout": question.layout.name}
    best: tuple[int, str] | None = None
    for row in named:
        if row.checkpoint != name:
            continue
        held = {"arch": row.arch, "layout": row.layout}
        changes = [f"{key}={held[key]}" for key in wanted if wanted[key] != held[key]]
        if not row.in_auto:
            changes.append("mode=require")
        if best is None or len(changes) < best[0]:
            best = (len(changes), f"{row.name}: set {', '.join(changes)}")
    return best[1] if best else None


def _names() -> str:
    return ", ".join(CHECKPOINTS.values())


def _or(names: list[str]) -> str:
    return " or ".join(names) if names else "a row in targets/table.py (there is none)"
