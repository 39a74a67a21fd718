"""The `tercel` command. A command's module is imported only when that command runs."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tercel import __version__
from tercel.errors import TercelError

COMMANDS = {
    "chat": "Talk to a model in the terminal.",
    "generate": "Complete one prompt.",
    "serve": "Serve a model over an OpenAI-compatible HTTP API.",
    "explain": "Say which target serves a configuration, and why.",
    "ops": "List the certified operations.",
    "certify": "Check and time kernels on this GPU.",
    "bench": "Time kernels on this GPU.",
    "gate": "Measure a model against what it must reach.",
    "checkpoint": "Inspect, count, convert and make checkpoints.",
}
"""Each is `app` of the module of its name."""


class _Group(TyperGroup):
    """Lists commands by the table above and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What help and suggestions show of a command."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments call."""
        name, _, rest = super().resolve_command(ctx, args)
        module = import_module(f"tercel.cli.{name}")
        command = typer.main.get_command(module.app)
        command.name = name
        return name, command, rest


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tercel {__version__}")
        raise typer.Exit


@app.callback()
def _tercel(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """An inference engine for the Kimi K3 model family."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 for an error of Tercel, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        app(arguments, prog_name="tercel")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except TercelError as error:
        return _failed(str(error))
    except OSError as error:
        # A full disk or a file without permission: its name and the reason are the whole story.
        if error.filename is None or error.strerror is None:
            raise
        return _failed(f"{error.filename}: {error.strerror}")
    return 0


def _failed(message: str) -> int:
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    return 1
