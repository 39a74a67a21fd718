"""Which named target serves a configuration: one tree per family that says what it looked at.

A criterion may be read here if it is known when the configuration is, stays constant for the
engine's life and changes the structure of the forward. `explain` replays the same tree from the
same configuration object.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tercel.config import EngineConfig
from tercel.core.arch import Arch
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.errors import NoTarget
from tercel.targets.table import NAMED, TargetRow, generic, portable

Shape = tuple[int, int, int, int]
"""num_hidden_layers, hidden_size, num_experts, latent size of the routed experts."""

K3: Shape = (93, 7168, 896, 3584)
KIMI_LINEAR: Shape = (27, 2304, 256, 2304)


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

    @property
    def speculation(self) -> str:
        return "none" if self.config.drafter is None else "dspark"


@dataclass(frozen=True)
class Route:
    """The row that serves, and the search that led to it."""

    row: TargetRow
    trace: Trace
    nearest: str | None
    """The closest named target that does not serve, with the fields to change."""

    @property
    def is_named(self) -> bool:
        return self.row.checkpoint != "any"


def route(question: Question, named: tuple[TargetRow, ...] = NAMED) -> Route:
    """The target of a configuration. Raises NoTarget where `require` finds none."""
    mode, trace = question.config.mode, Trace()
    layout = question.layout.name
    if not trace.check("mode", mode, mode != "off", "auto or require to search for a target"):
        return Route(portable(layout), trace, None)
    row = _family(question, named, trace)
    if row is not None:
        return Route(row, trace, None)
    nearest = nearest_target(question, named)
    if mode == "require":
        near = f"nearest: {nearest}" if nearest else "no target serves a checkpoint of this shape"
        fix = "mode=auto serves it by the generic target"
        raise NoTarget(f"mode=require found no named target:\n{trace}\n{near}; {fix}")
    return Route(generic(layout), trace, nearest)


def checkpoint_name(model: ModelConfig) -> str | None:
    """The name of the published checkpoint with this shape and quantization."""
    formats = {K3: _K3_FORMATS, KIMI_LINEAR: _KIMI_LINEAR_FORMATS}.get(_shape(model), {})
    return formats.get(model.quant_method)


_K3_FORMATS: dict[str | None, str] = {
    "compressed-tensors": "kimi_k3_mxfp4",
    "modelopt_mixed": "kimi_k3_nvfp4",
}
_KIMI_LINEAR_FORMATS: dict[str | None, str] = {None: "kimi_linear_bf16"}


def _shape(model: ModelConfig) -> Shape:
    return (model.num_hidden_layers, model.hidden_size, model.num_experts, model.latent_size)


def _family(question: Question, named: tuple[TargetRow, ...], trace: Trace) -> TargetRow | None:
    """Attention residuals tell the two families apart; class names do not."""
    if question.model.attn_res_block_size is not None:
        trace.resolve("family", "attention residuals", "kimi_k3")
        return _tree(question, named, trace, K3, _K3_FORMATS)
    trace.resolve("family", "plain residual", "kimi_linear")
    return _tree(question, named, trace, KIMI_LINEAR, _KIMI_LINEAR_FORMATS)


def _tree(
    question: Question,
    named: tuple[TargetRow, ...],
    trace: Trace,
    shape: Shape,
    formats: dict[str | None, str],
) -> TargetRow | None:
    model, config, layout = question.model, question.config, question.layout
    if not trace.check("shape", _shape(model), _shape(model) == shape, str(shape)):
        return None
    known = ", ".join(f"{name} ({method})" for method, name in formats.items())
    name = trace.resolve("quant", model.quant_method, formats.get(model.quant_method), known)
    rows = [row for row in named if row.checkpoint == name]
    archs = sorted({row.arch for row in rows})
    if name is None or not trace.check("arch", question.arch, question.arch in archs, _or(archs)):
        return None
    rows = [row for row in rows if row.arch == question.arch]
    value = f"{layout.name} (expert split {'set' if layout.split_set else 'unset'})"
    layouts = sorted(row.layout for row in rows)
    if not trace.check("layout", value, layout.name in layouts, _or(layouts)):
        return None
    row = next(row for row in rows if row.layout == layout.name)
    speculation = question.speculation
    allowed = sorted(row.speculation)
    if not trace.check("speculation", speculation, speculation in allowed, _or(allowed)):
        return None
    kv_dtypes = sorted(row.kv_dtypes)
    if not trace.check("kv dtype", config.kv_dtype, config.kv_dtype in kv_dtypes, _or(kv_dtypes)):
        return None
    may_choose = row.in_auto or config.mode == "require"
    if not trace.check("in auto", row.in_auto, may_choose, "mode=require"):
        return None
    trace.resolve("target", row.recipe, row.name)
    return row


def nearest_target(question: Question, named: tuple[TargetRow, ...] = NAMED) -> str | None:
    """The row for this shape that differs in the fewest fields, and what to change for it."""
    formats = {K3: _K3_FORMATS, KIMI_LINEAR: _KIMI_LINEAR_FORMATS}.get(_shape(question.model), {})
    rows = [row for row in named if row.checkpoint in formats.values()]
    best = min(rows, key=lambda row: _effort(_changes(question, row)), default=None)
    return None if best is None else f"{best.name}: set {', '.join(_changes(question, best))}"


def _effort(changes: list[str]) -> int:
    """Another machine or checkpoint is further away than another setting."""
    return sum(2 if change.startswith(("arch=", "checkpoint=")) else 1 for change in changes)


def _changes(question: Question, row: TargetRow) -> list[str]:
    """The fields that keep `question` from `row`, with the values it needs."""
    config = question.config
    held = {
        "checkpoint": checkpoint_name(question.model),
        "arch": question.arch,
        "layout": question.layout.name,
    }
    changes = [
        f"{field}={getattr(row, field)}"
        for field, value in held.items()
        if value != getattr(row, field)
    ]
    if question.speculation not in row.speculation:
        changes.append("drafter" if question.speculation == "none" else "no drafter")
    if config.kv_dtype not in row.kv_dtypes:
        changes.append(f"kv_dtype={_or(sorted(row.kv_dtypes))}")
    if not row.in_auto and config.mode != "require":
        changes.append("mode=require")
    return changes


def _or(names: Sequence[str]) -> str:
    return " or ".join(names) if names else "a row in targets/table.py (there is none)"
