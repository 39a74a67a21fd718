"""`tercel explain`: which target serves a configuration, why, and what it runs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tercel.cli.options import Json, dataclass_options
from tercel.config import EngineConfig
from tercel.core.arch import Arch, arch_of
from tercel.core.layout import Layout
from tercel.core.model import ModelConfig
from tercel.core.step import StepClass
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
    as_json: Json = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Replay the routing tree for a configuration and show the program it leads to.

    Exits with 1 where mode=require finds no target."""
    config = EngineConfig(model=model, **engine)
    described = published_config(model) if model in NAMES else None
    parsed = ModelConfig.from_dict(described) if described else ModelConfig.load(Path(model))
    device = device_of(config)
    plan = resolve(
        parsed, config, arch=arch or arch_of(device), dtype=dtype_of(config, device), rank=rank
    )
    if as_json:
        typer.echo(json.dumps(_as_dict(plan, step)))
        return
    _print(plan, step, Console())


def _print(plan: Plan, step: StepClass | None, console: Console) -> None:
    console.print(str(plan.route.trace), highlight=False)
    if plan.route.nearest:
        console.print(f"nearest      {plan.route.nearest}", highlight=False)
    layout: Layout = plan.place.layout
    console.print(f"\n=> {plan.route.row.name}  (recipe {plan.route.row.recipe})", highlight=False)
    console.print(
        f"   rank {plan.place.rank} of {layout.world_size}, "
        f"{str(plan.dtype).removeprefix('torch.')}, program {plan.digest[:16]}, "
        f"decode {plan.certified:.0%} certified\n",
        highlight=False,
    )
    console.print(_step_table(plan) if step is None else _call_table(plan.calls[step]))


def _step_table(plan: Plan) -> Table:
    table = Table("site", "op", "implementation", "status", "why", title="decode step")
    for site, bound in plan.binding[StepClass.DECODE].items():
        if any(call.site == site for call in plan.calls[StepClass.DECODE]):
            table.add_row(
                site, bound.op.name, bound.implementation.name, bound.status, bound.reason
            )
    return table


def _call_table(calls: tuple[Call, ...]) -> Table:
    table = Table("#", "site", "op", "implementation", "tensors", "MB", "MFLOP")
    for index, call in enumerate(calls):
        shapes = " ".join(f"{name}{list(shape)}" for name, shape, _ in call.shapes)
        megabytes, megaflops = f"{call.bytes / 1e6:.3f}", f"{call.flops / 1e6:.2f}"
        table.add_row(
            str(index), call.site, call.op, call.implementation, shapes, megabytes, megaflops
        )
    return table


def _as_dict(plan: Plan, step: StepClass | None) -> dict[str, Any]:
    shown = plan.calls if step is None else {step: plan.calls[step]}
    return {
        "target": plan.route.row.name,
        "recipe": plan.route.row.recipe,
        "policy": plan.route.row.policy,
        "trace": [
            {"label": line.label, "value": line.value, "outcome": line.outcome}
            for line in plan.route.trace.lines
        ],
        "nearest": plan.route.nearest,
        "layout": plan.place.layout.name,
        "rank": plan.place.rank,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "program": plan.digest,
        "certified": plan.certified,
        "steps": {
            step_class.value: [
                {
                    "site": call.site,
                    "op": call.op,
                    "implementation": call.implementation,
                    "status": call.status,
                    "tensors": {name: [list(shape), dtype] for name, shape, dtype in call.shapes},
                    "bytes": call.bytes,
                    "flops": call.flops,
                }
                for call in calls
            ]
            for step_class, calls in shown.items()
        },
    }
