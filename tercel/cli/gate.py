"""`tercel gate`: what a model must reach."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tercel.cli.options import Json, dataclass_options
from tercel.cli.ranks import serve_as_rank
from tercel.config import EngineConfig
from tercel.gates.acceptance import RECORD, AcceptanceGate, read_record, record, unhealthy
from tercel.gates.accuracy import AccuracyGate

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def _gate() -> None:
    """Measure a model against what it must reach."""


@app.command()
@dataclass_options(EngineConfig, "engine", skip=("model", "seed", "max_running"))
@dataclass_options(AccuracyGate, "gate")
def accuracy(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.")],
    gsm8k: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="GSM8K test file (JSON lines), for its perplexity."
        ),
    ] = None,
    at_least: Annotated[
        float, typer.Option(min=0, max=1, help="Exit with 1 if exact match is lower.")
    ] = 0.0,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
    gate: dict[str, Any],
) -> None:
    """Exact match on fresh word problems that training cannot have seen."""
    from tercel.cli.progress import counting_bar, loading_bar
    from tercel.runtime.llm import LLM

    plan = AccuracyGate(**gate)
    engine |= {"model": str(model), "max_running": plan.batch}
    if serve_as_rank(EngineConfig(**engine)):
        return
    with loading_bar() as progress:
        llm = LLM(progress=progress, **engine)
    with llm, counting_bar("Problems") as report:
        measured = plan.run(llm, report)
    result = {"model": str(model), "seed": plan.seed, **measured.to_dict()}
    if gsm8k is not None:
        from tercel.gates.perplexity import gsm8k_perplexity

        with counting_bar("GSM8K") as report:
            result["gsm8k_perplexity"] = gsm8k_perplexity(model, gsm8k, report)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _show(result)
    if result["exact_match"] < at_least:
        typer.secho(f"exact match is below {at_least:.1%}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


@app.command()
@dataclass_options(EngineConfig, "engine", skip=("model", "drafter", "seed", "max_running"))
@dataclass_options(AcceptanceGate, "gate")
def acceptance(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.")],
    drafter: Annotated[str, typer.Option(help="Directory of a drafter checkpoint, or `suffix`.")],
    save: Annotated[
        bool, typer.Option(help="Record the figures as healthy, beside the drafter.")
    ] = False,
    as_json: Json = False,
    *,
    engine: dict[str, Any],
    gate: dict[str, Any],
) -> None:
    """How many guesses of a drafter are accepted; exit 1 below 97 % of what is recorded, or
    further by chance where problems are few."""
    from tercel.cli.progress import counting_bar, loading_bar
    from tercel.runtime.llm import LLM

    plan = AcceptanceGate(**{**gate, "temperatures": gate["temperatures"] or (0.0, 1.0)})
    engine |= {"model": str(model), "drafter": drafter, "max_running": plan.batch}
    if serve_as_rank(EngineConfig(**engine)):
        return
    with loading_bar() as progress:
        llm = LLM(progress=progress, **engine)
    with llm, counting_bar("Problems") as report:
        measured = plan.run(llm, report)
    problems = unhealthy(measured, read_record(Path(drafter)))
    result = {
        "model": str(model),
        "drafter": drafter,
        "rule": engine["acceptance"],
        "problems": plan.problems,
        "forced_acceptance": engine["forced_acceptance"] is not None,
        "acceptance": [each.to_dict() for each in measured],
        "unhealthy": problems,
    }
    if save:
        text = json.dumps(record(measured, plan), indent=1)
        (Path(drafter) / RECORD).write_text(text + "\n")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _show_acceptance(result)
    if problems and not save:
        typer.secho("; ".join(problems), fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


def _show_acceptance(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("temperature", "acceptance length", "rounds", "per position", box=None)
    for each in result["acceptance"]:
        table.add_row(
            f"{each['temperature']:g}",
            f"{each['acceptance_length']:.3f}",
            str(each["rounds"]),
            " ".join(f"{share:.3f}" for share in each["per_position"]),
        )
    Console().print(table)
    if result["forced_acceptance"]:
        typer.echo("acceptance is forced: the texts are not the model's")


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("problems", "exact match", "right", "of", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, score in result["scores"].items():
        table.add_row(name, f"{score['exact_match']:.1%}", str(score["right"]), str(score["of"]))
    Console().print(table)
    if "gsm8k_perplexity" in result:
        typer.echo(f"GSM8K perplexity {result['gsm8k_perplexity']:.2f}")
