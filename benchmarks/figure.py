"""A measured number beside its goal, and the form in which every program here reports."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import typer
from rich.console import Console
from rich.table import Table

Relation = Literal["<=", ">=", "="]


@dataclass(frozen=True)
class Figure:
    """One number; without a goal it is reported as it is."""

    name: str
    measured: float | None
    """None: not measured, because something that it needs is absent."""
    relation: Relation | None = None
    """How `measured` has to stand to `goal`."""
    goal: float | None = None
    form: str = ",.4g"
    """Python format of both numbers."""

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `not run`, or nothing where there is no goal."""
        if self.measured is None:
            return "not run"
        if self.goal is None:
            return ""
        is_met = {
            "<=": self.measured <= self.goal,
            ">=": self.measured >= self.goal,
            "=": self.measured == self.goal,
        }[self.relation or "="]
        return "met" if is_met else "missed"

    def row(self) -> tuple[str, str, str, str]:
        """Name, goal, measured, verdict."""
        goal = "" if self.goal is None else f"{self.relation} {self.goal:{self.form}}"
        measured = "" if self.measured is None else f"{self.measured:{self.form}}"
        return self.name, goal, measured, self.verdict


COLUMNS = ("figure", "goal", "measured", "")


@dataclass(frozen=True)
class Report:
    """What one program measured."""

    title: str
    figures: tuple[Figure, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the numbers depend on: sizes, counts, versions of other software."""

    @property
    def missed(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if figure.verdict == "missed")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        figures = tuple(Figure(**figure) for figure in values["figures"])
        return cls(values["title"], figures, values["settings"])

    def to_dict(self) -> dict[str, Any]:
        """For JSON, the names of missed figures included."""
        return {**asdict(self), "missed": [figure.name for figure in self.missed]}


def publish(report: Report, as_json: bool) -> None:
    """Prints the report. Raises typer.Exit(1) where a goal is missed."""
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        show(report)
    if report.missed:
        raise typer.Exit(1)


def show(report: Report) -> None:
    """The report as a table on the terminal."""
    table = Table(*COLUMNS, title=report.title, title_justify="left", box=None)
    for column in table.columns[1:3]:
        column.justify = "right"
    styles = {"met": "green", "missed": "bold red", "not run": "yellow", "": ""}
    for figure in report.figures:
        *cells, verdict = figure.row()
        table.add_row(*cells, f"[{styles[verdict]}]{verdict}[/]" if verdict else "")
    console = Console()
    console.print(table)
    console.print(joined(report.settings), style="dim")


def joined(values: Mapping[str, Any]) -> str:
    """`name value` pairs on one line."""
    return "; ".join(f"{name} {value}" for name, value in values.items())
