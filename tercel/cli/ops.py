"""`tercel ops`: the catalog, and where each implementation is certified."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tercel.cli.options import Json
from tercel.contract.receipt import status
from tercel.core.arch import Arch
from tercel.ops.catalog import catalog

app = typer.Typer(add_completion=False)


@app.command()
def ops(
    name: Annotated[str, typer.Argument(help="Only ops whose name contains this.")] = "",
    as_json: Json = False,
) -> None:
    """List every op with its implementations and their status per architecture."""
    chosen = {full: op for full, op in catalog().items() if name in full}
    if as_json:
        for full, op in chosen.items():
            for implementation in op.implementations.values():
                for arch in sorted(implementation.archs):
                    held = status(op, implementation.name, arch).value
                    entry = {
                        "name": full,
                        "implementation": implementation.name,
                        "arch": arch.value,
                        "status": held,
                    }
                    typer.echo(json.dumps(entry))
        return
    table = Table("op", "implementation", *(arch.value for arch in Arch))
    for full, op in chosen.items():
        for implementation in op.implementations.values():
            states = [
                status(op, implementation.name, arch).value if arch in implementation.archs else "-"
                for arch in Arch
            ]
            table.add_row(full, implementation.name, *states)
    Console().print(table)
