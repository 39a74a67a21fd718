"""`tercel gate`: what a model must reach."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tercel.cli.options import Json, dataclass_options
from tercel.cli.ranks import serve_as_rank
from tercel.config import EngineConfig
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
