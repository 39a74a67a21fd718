"""`tercel explain`: which target serves a configuration, why, and what it runs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tercel.cli.options import Json, dataclass_options
from tercel.config import EngineConfig
from tercel.core.arch import Arch, arch_of
from tercel.core.model import ModelConfig
from tercel.core.step import StepClass
from tercel.errors import ConfigError
from tercel.targets.diff import Difference, diff
from tercel.targets.load import Plan, device_of, dtype_of, resolve
from tercel.targets.recording import Call
from tercel.weights.published import NAMES, published_config

app = typer.Typer(add_completion=False)


@app.command()
@dataclass_options(EngineConfig, "engine", skip=("model",))
def explain(
    model: Annotated[
        str, typer.Argument(help=f"Checkpoint directory, or one of {', '.join(NAMES)}.")
    ],
    arch: Annotated[
        Arch | None, typer.Option(help="Architecture to ask for. Default: this machine's.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank whose program is shown.")] = 0,
    step: Annotated[
        StepClass | None, typer.Option("--show", help="List the ops of this kind of step.")
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option("--diff", help="FIELD=VALUE: compare with the program under this setting."),
    ] = None,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Replay the routing tree for a configuration and show the program it leads to.

    Exits with 1 where mode=require finds no target."""
    plan = _resolve(model, engine, arch, rank)
    other = _resolve(model, {**engine, **_settings(changed)}, arch, rank) if changed else None
    if as_json:
        typer.echo(json.dumps(_as_dict(plan, step, other)))
        return
    console = Console()
    _print_head(plan, console)
    if other is not None:
        _print_head(other, console)
        console.print(_difference_table(diff(plan.calls, other.calls)))
    elif step is not None:
        console.print(_call_table(plan.calls.get(step, ())))
    else:
        console.print(_site_table(plan))


def _resolve(model: str, engine: Mapping[str, Any], arch: Arch | None, rank: int) -> Plan:
    config = EngineConfig.from_dict({"model": model, **engine})
    described = published_config(model) if model in NAMES else None
    parsed = ModelConfig.from_dict(described) if described else ModelConfig.load(Path(model))
    device = device_of(config)
    dtype = dtype_of(config, device)
    return resolve(parsed, config, arch=arch or arch_of(device), dtype=dtype, rank=rank)


def _settings(changed: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    kinds = {item.name: item.type for item in fields(EngineConfig)}
    for text in changed:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--diff {text}: expected FIELD=VALUE")
        settings[name] = int(value) if "int" in str(kinds.get(name)) else value
    return settings


def _print_head(plan: Plan, console: Console) -> None:
    row, place = plan.route.row, plan.place
    console.print(str(plan.route.trace), highlight=False)
    if plan.route.nearest:
        console.print(f"nearest      {plan.route.nearest}", highlight=False)
    console.print(f"\n=> {row.name}  (recipe {row.recipe})", highlight=False)
    console.print(
        f"   rank {place.rank} of {place.layout.world_size}, "
        f"{str(plan.dtype).removeprefix('torch.')}, program {plan.digest[:16]}, "
        f"decode {plan.certified:.0%} certified\n",
        highlight=False,
    )


def _site_table(plan: Plan) -> Table:
    table = Table("site", "op", "implementation", "status", "why", title="decode step")
    called = {call.site for call in plan.calls[StepClass.DECODE]}
    for site, bound in plan.binding[StepClass.DECODE].items():
        if site in called:
            names = bound.op.name, bound.implementation.name
            table.add_row(site, *names, bound.status, bound.reason)
    return table


def _call_table(calls: tuple[Call, ...]) -> Table:
    table = Table("#", "site", "op", "implementation", "tensors", "MB", "MFLOP")
    for index, call in enumerate(calls):
        shapes = " ".join(f"{name}{list(shape)}" for name, shape, _ in call.shapes)
        cost = f"{call.bytes / 1e6:.3f}", f"{call.flops / 1e6:.2f}"
        table.add_row(str(index), call.site, call.op, call.implementation, shapes, *cost)
    return table


def _difference_table(differences: list[Difference]) -> Table:
    table = Table("step", "site", "call", "before", "after", title="calls that differ in number")
    for item in differences:
        counts = str(item.before), str(item.after)
        table.add_row(item.step_class, item.site, item.call, *counts)
    return table


def _as_dict(plan: Plan, step: StepClass | None, other: Plan | None) -> dict[str, Any]:
    row, place = plan.route.row, plan.place
    shown = plan.calls if step is None else {step: plan.calls.get(step, ())}
    described: dict[str, Any] = {
        "target": row.name,
        "recipe": row.recipe,
        "policy": row.policy,
        "trace": [asdict(line) for line in plan.route.trace.lines],
        "nearest": plan.route.nearest,
        "layout": place.layout.name,
        "rank": place.rank,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "program": plan.digest,
        "certified": plan.certified,
        "weight_bytes": plan.weight_bytes,
        "steps": {
            step_class.value: [_call_as_dict(call) for call in calls]
            for step_class, calls in shown.items()
        },
    }
    if other is not None:
        described["other"] = {"target": other.route.row.name, "program": other.digest}
        described["diff"] = [asdict(item) for item in diff(plan.calls, other.calls)]
    return described


def _call_as_dict(call: Call) -> dict[str, Any]:
    tensors = {name: [list(shape), dtype] for name, shape, dtype in call.shapes}
    named = {key: value for key, value in asdict(call).items() if key != "shapes"}
    return {**named, "tensors": tensors}
