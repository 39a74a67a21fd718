"""How long the tests take, installation aside."""

import subprocess
import sys
import time
from typing import Annotated

import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import ROOT
from tercel.cli.options import Json

LIMIT_S = 600


def main(
    tests: Annotated[list[str] | None, typer.Argument(help="Of pytest; default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Seconds of the whole test suite on this machine."""
    command = [sys.executable, "-m", "pytest", "-q", *(tests or ())]
    start = time.perf_counter()
    # Progress goes to the terminal, also where the figures are read as JSON.
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    seconds = time.perf_counter() - start
    figures = (
        Figure("seconds", seconds, "<=", LIMIT_S, ".0f"),
        Figure("exit status of pytest", code, "=", 0, "d"),
    )
    publish(Report("The test suite", figures), as_json)


if __name__ == "__main__":
    typer.run(main)
