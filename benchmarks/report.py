"""Runs every CPU figure and writes docs/benchmarks/cpu.json and the page that it renders to.

A figure that is run alone replaces its own entry; date, machine and versions are those of its run.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figure import Figure, Report, show
from benchmarks.page import PAGE, RESULTS, render
from benchmarks.paths import NANO, ROOT, Model
from tercel import __version__
from tercel.cli.progress import counting_bar

PACKAGES = ("torch", "numpy", "safetensors")
PUBLISHED = {"tensors": 497_220, "bytes": 1_560_860_324_864}
"""Of the published K3."""


def accuracy(result: dict[str, Any]) -> Report:
    """Of `tercel gate accuracy --json`."""
    scores = {name: score["exact_match"] for name, score in result["scores"].items()}
    figures = [Figure("trained templates", scores.pop("trained templates"), ">=", 0.95, ".1%")]
    figures += [Figure(name, score, form=".1%") for name, score in scores.items()]
    figures.append(Figure("GSM8K test perplexity", result.get("gsm8k_perplexity"), form=".2f"))
    counts = {f"problems, {name}": score["of"] for name, score in result["scores"].items()}
    return Report("Exact match on fresh word problems, greedy", tuple(figures), counts)


def manifest(result: dict[str, Any]) -> Report:
    """Of `tercel checkpoint manifest --json`."""
    figures = [Figure(name, result[name], "=", goal, ",d") for name, goal in PUBLISHED.items()]
    return Report(f"Manifest of {result['model']} from its config alone", tuple(figures))


@dataclass(frozen=True)
class Program:
    """One command that prints JSON, and how a report is read from that."""

    module: str
    arguments: Sequence[str] = ()
    read: Callable[[dict[str, Any]], Report] = Report.from_dict

    @property
    def command(self) -> list[str]:
        return ["python", "-m", self.module, *self.arguments, "--json"]


def programs(model: Path, mlx_python: Path | None, gsm8k: Path | None) -> dict[str, Program]:
    """Name to program, in the order of their run."""
    on_model = path_option("--model", model)
    mlx = path_option("--mlx-python", mlx_python)
    perplexity = path_option("--gsm8k", gsm8k)
    return {
        "manifest": Program("tercel", ("checkpoint", "manifest"), manifest),
        "parity": Program("benchmarks.parity", on_model),
        "throughput": Program("benchmarks.cpu_throughput", (*on_model, *mlx)),
        "load_memory": Program("benchmarks.load_memory"),
        "rank_loading": Program("benchmarks.rank_loading"),
        "convert_texts": Program("benchmarks.convert_texts", on_model),
        "convert_oracle": Program("benchmarks.convert_oracle", (*on_model, *mlx)),
        "layouts": Program("benchmarks.layouts", on_model),
        "layouts_random": Program("benchmarks.layouts", ("--random",)),
        "recycling": Program("benchmarks.recycling", on_model),
        "accuracy": Program("tercel", ("gate", "accuracy", *on_model, *perplexity), accuracy),
        "drafting": Program("benchmarks.drafting", on_model),
        "planted_faults": Program("benchmarks.planted_faults", on_model),
        "suite_time": Program("benchmarks.suite_time"),
    }


def path_option(name: str, path: Path | None) -> tuple[str, ...]:
    """Relative, because the page shows it."""
    return () if path is None else (name, os.path.relpath(path, ROOT))


def run(program: Program) -> dict[str, Any]:
    """One entry of the results. Raises SystemExit where the program gives no report."""
    start = time.perf_counter()
    command = [sys.executable, *program.command[1:]]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - start
    try:
        report = program.read(json.loads(done.stdout))
    except ValueError as error:
        raise SystemExit(f"{shlex.join(program.command)}: exit {done.returncode}") from error
    return {
        "command": shlex.join(program.command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(seconds, 1),
        "machine": {"CPU": processor(), "cores": os.cpu_count()},
        "versions": versions(),
        "report": report.to_dict(),
    }


def processor() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    own = f"{__version__} ({commit.strip() or 'no commit'})"
    return {"tercel": own, "Python": platform.python_version(), **packages}


def main(
    only: Annotated[list[str] | None, typer.Argument(help="Figures to run; default: all.")] = None,
    model: Model = NANO,
    mlx_python: Annotated[Path | None, typer.Option(help="Python that has mlx-lm.")] = None,
    gsm8k: Annotated[Path | None, typer.Option(help="GSM8K test file (JSON lines).")] = None,
) -> None:
    """Run the figures and write them down; exit with 1 where a goal is missed."""
    known = programs(model, mlx_python, gsm8k)
    unknown = set(only or ()) - set(known)
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; there is {', '.join(known)}")
    results, page = ROOT / RESULTS, ROOT / PAGE
    entries = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    missed = 0
    with counting_bar("Figures") as progress:
        for done, name in enumerate(only or known):
            progress(done, len(only or known))
            entries[name] = run(known[name])
            results.parent.mkdir(exist_ok=True)
            results.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
            page.write_text(render(results), encoding="utf-8")
            report = Report.from_dict(entries[name]["report"])
            show(report)
            missed += len(report.missed)
    print(f"wrote {RESULTS} and {PAGE}")
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
