"""`tercel ops`: the catalog, and where each implementation is certified."""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tercel.cli.options import Json
from tercel.contract import Op
from tercel.contract.receipt import Receipt, content_hash, status, write_receipts
from tercel.core.arch import Arch
from tercel.errors import ConfigError, ReceiptError
from tercel.ops.catalog import catalog

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def ops(
    context: typer.Context,
    only: Annotated[str, typer.Option(help="Only ops whose name contains this.")] = "",
    as_json: Json = False,
) -> None:
    """List every op with its implementations and their status per architecture."""
    if context.invoked_subcommand is not None:
        return
    chosen = {full: op for full, op in catalog().items() if only in full}
    if not chosen:
        raise ConfigError(f"only: {only!r} is in no op's name; `tercel ops` lists them")
    if as_json:
        for entry in _entries(chosen):
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
    whole = Console(width=1000).measure(table).maximum
    Console(width=max(whole, Console().width)).print(table)


def _entries(chosen: dict[str, Op[..., Any]]) -> list[dict[str, str]]:
    """One per op, implementation and architecture."""
    return [
        {
            "name": full,
            "implementation": implementation.name,
            "arch": arch.value,
            "status": status(op, implementation.name, arch).value,
        }
        for full, op in chosen.items()
        for implementation in op.implementations.values()
        for arch in sorted(implementation.archs)
    ]


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A bundle that `tercel certify` wrote.")],
    as_json: Json = False,
) -> None:
    """Put a bundle's receipts into the op folders, if they are of this source."""
    receipts = read_bundle(file)
    held = {op.name: op for op in catalog().values()}
    wrong = [problem for receipt in receipts if (problem := _problem(receipt, held))]
    if wrong:
        raise ReceiptError(f"{file}: nothing imported; " + "; ".join(wrong))
    for name in sorted({receipt.op for receipt in receipts}):
        write_receipts(held[name], [receipt for receipt in receipts if receipt.op == name])
        typer.echo(json.dumps({"imported": name}) if as_json else f"{name}: imported")


def read_bundle(file: Path) -> tuple[Receipt, ...]:
    """The receipts of a bundle; raises ReceiptError for what is none."""
    fix = "pass a file that `tercel certify --out` wrote"
    try:
        receipts = msgspec.json.decode(file.read_bytes(), type=tuple[Receipt, ...])
    except OSError as error:
        raise ReceiptError(f"{file}: {(error.strerror or str(error)).lower()}; {fix}") from error
    except msgspec.MsgspecError as error:
        raise ReceiptError(f"{file}: not a whole bundle, {error}; {fix}") from error
    if not receipts:
        raise ReceiptError(f"{file}: no kernel was certified when it was written; {fix}")
    return receipts


def _problem(receipt: Receipt, held: dict[str, Op[..., Any]]) -> str | None:
    """Why a receipt does not belong to this source; None where it does."""
    op = held.get(receipt.op)
    if op is None or receipt.implementation not in op.implementations:
        return f"there is no {receipt.op} {receipt.implementation}"
    if receipt.content_hash != content_hash(op, receipt.implementation):
        return f"{receipt.op} {receipt.implementation} was certified from other source"
    return None
