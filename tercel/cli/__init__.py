"""The `tercel` command: one module per subcommand, imported when it is called."""

import sys
from collections.abc import Sequence
from importlib import import_module

import typer
from rich.console import Console
from rich.text import Text

from tercel.errors import TercelError

COMMANDS = {
    "checkpoint": "Inspect, count and make checkpoints.",
}
"""Module of tercel.cli with a typer `app` -> one line of help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 for an error of Tercel, 2 for wrong usage, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = typer.main.get_command(_app(arguments[0] if arguments else None))
    try:
        command.main(arguments, prog_name="tercel")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except TercelError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
        return 1
    return 0


def _app(called: str | None) -> typer.Typer:
    """All commands by name; only the one that is called is imported."""
    app = typer.Typer(
        help="An inference engine for Kimi K3.", no_args_is_help=True, add_completion=False
    )
    for name, text in COMMANDS.items():
        named = typer.Typer(callback=lambda: None)
        command = import_module(f"tercel.cli.{name}").app if name == called else named
        app.add_typer(command, name=name, help=text)
    return app
