"""`tercel certify`: checks and times kernels on this machine's GPU, and writes one bundle."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer

from tercel.cli.options import Json
from tercel.contract import Op
from tercel.contract.certify import certify
from tercel.contract.receipt import CellResult, Receipt, Status, status
from tercel.contract.timing import copy_bandwidth
from tercel.core.arch import Arch, arch_of
from tercel.errors import CheckFailed, ConfigError
from tercel.ops.catalog import catalog

app = typer.Typer(add_completion=False)
COPY_BYTES = 1 << 30


@app.command(name="certify")
def command(
    out: Annotated[Path, typer.Option(help="The bundle, for `tercel ops import`.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP", help="Ops by name; default: those that have changed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Certify kernels: every cell against the fp64 reference, graph replay, then time."""
    arch = _gpu()
    copy_rate = copy_bandwidth(COPY_BYTES, device="cuda")
    if not as_json:
        typer.echo(f"{torch.cuda.get_device_name()}, copy {copy_rate / 1e9:.0f} GB/s")
    receipts, failures = [], []
    for op, implementation in _wanted(names or [], arch):
        try:
            receipt = certify(op, implementation, arch, copy_bytes_per_s=copy_rate)
        except CheckFailed as failure:
            failures.append(f"{op.name} {implementation}: {failure}")
            continue
        receipts.append(receipt)
        typer.echo(msgspec.json.encode(receipt) if as_json else _text(receipt, copy_rate))
        out.write_bytes(msgspec.json.encode(receipts))
    if failures:
        raise CheckFailed("; ".join(failures))


def _gpu() -> Arch:
    if not torch.cuda.is_available():
        raise ConfigError("certify: there is no GPU; run it where the kernels will run")
    arch = arch_of(torch.device("cuda"))
    if arch is None:
        raise ConfigError(f"certify: no target names {torch.cuda.get_device_name()}")
    return arch


def _wanted(names: list[str], arch: Arch) -> Iterator[tuple[Op[..., Any], str]]:
    """Named kernels, or those whose receipt does not hold."""
    ops = {op.name: op for op in catalog().values()}
    unknown = set(names) - set(ops)
    if unknown:
        raise ConfigError(f"certify: no op {', '.join(sorted(unknown))}; `tercel ops` lists them")
    for op in ops.values():
        for name, implementation in op.implementations.items():
            is_kernel = name not in ("reference", "portable") and arch in implementation.archs
            if is_kernel and (
                op.name in names if names else status(op, name, arch) != Status.CERTIFIED
            ):
                yield op, name


def _text(receipt: Receipt, copy_rate: float) -> str:
    lines = [f"{receipt.op} {receipt.implementation}"]
    return "\n".join([*lines, *(_line(cell, copy_rate) for cell in receipt.cells)])


def _line(cell: CellResult, copy_rate: float) -> str:
    errors = f"  {cell.cell}: {cell.element_ulps:.2f} ulps, rms {cell.rms_ulps:.2f}"
    if cell.median_us is None or cell.bytes is None:
        return errors
    rate = cell.bytes / cell.median_us * 1e6
    spread = f"{cell.low_us:.2f}..{cell.high_us:.2f}"
    others = "".join(f", {name} {us:.2f}" for name, us in cell.baselines_us.items())
    return (
        f"{errors}; {cell.median_us:.2f} us ({spread}), {rate / 1e9:.0f} GB/s, "
        f"{rate / copy_rate:.2f} of copy{others}"
    )
