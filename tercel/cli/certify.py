"""`tercel certify`: checks and times kernels on this machine's GPU, and writes one bundle."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tercel.cli.kernels import ceilings, gpu_arch, kernels, named_ops, time_line
from tercel.cli.options import Json
from tercel.contract.certify import Certification, Verdict
from tercel.contract.receipt import Ceilings, Receipt
from tercel.errors import CheckFailed, ConfigError

app = typer.Typer(add_completion=False)
PROCESSES = 12


@app.command(name="certify")
def command(
    out: Annotated[Path, typer.Option(help="The bundle, for `tercel ops import`.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP", help="Ops by name; default: those that have changed."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="All that it may take.")] = 600.0,
    peers: Annotated[bool, typer.Option(help="Time the installed public kernels too.")] = False,
    as_json: Json = False,
) -> None:
    """Certify kernels: every cell against the fp64 reference, graph replay, then time."""
    ops = named_ops(names)
    if not out.parent.is_dir():
        raise ConfigError(f"out: {out.parent} is not a directory; make it, or name another file")
    arch = gpu_arch("certify")
    run = Certification(
        subjects=kernels(ops, arch, every=bool(names)),
        arch=arch,
        ceilings=ceilings(),
        command=shlex.join(["tercel", *sys.argv[1:]]).replace(str(out), out.name),
        seconds=seconds,
        processes=min(PROCESSES, os.cpu_count() or 1),
        peers=peers,
    )
    bundle = _Bundle(out, as_json)
    bundle.report(f"{len(run.subjects)} kernels to certify, {_described(run.ceilings)}")
    right: list[Verdict] = []
    wrong: list[Verdict] = []
    for verdict in run.check():
        bundle.report(_checked(verdict))
        if verdict.problems:
            wrong.append(verdict)
        elif verdict.is_right:
            right.append(verdict)
            bundle.add(run.receipt(verdict))
    for verdict in run.time(right):
        bundle.add(run.receipt(verdict))
        bundle.report(_timed(verdict, run.ceilings))
    rest = len(run.subjects) - len(right) - len(wrong)
    bundle.report(f"{len(right)} certified, {len(wrong)} failed, {rest} not reached; wrote {out}")
    if as_json:
        bundle.print()
    if wrong:
        raise CheckFailed("not certified: " + ", ".join(str(each.subject) for each in wrong))


class _Bundle:
    """The receipts so far, on disk as soon as they are there."""

    def __init__(self, path: Path, as_json: bool) -> None:
        self._path, self._as_json = path, as_json
        self._receipts: dict[tuple[str, str], Receipt] = {}
        self._write()

    def add(self, receipt: Receipt) -> None:
        """Replaces an earlier one of the same kernel."""
        self._receipts[receipt.op, receipt.implementation] = receipt
        self._write()

    def report(self, text: str) -> None:
        typer.echo(text, err=self._as_json)

    def print(self) -> None:
        """One receipt per line, as JSON."""
        for receipt in self._receipts.values():
            typer.echo(msgspec.json.encode(receipt).decode())

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(list(self._receipts.values())))
        unfinished.replace(self._path)


def _described(ceilings: Ceilings) -> str:
    return (
        f"copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, "
        f"read {ceilings.read_bytes_per_s / 1e9:.0f} GB/s, "
        f"bf16 {ceilings.bf16_flops_per_s / 1e12:.0f} TFLOP/s"
    )


def _checked(verdict: Verdict) -> str:
    head = f"{verdict.seconds:5.0f} s {verdict.subject}: "
    if verdict.is_right:
        return (
            f"{head}{len(verdict.errors)} cells right, worst {verdict.worst_share:.2f} of allowed"
        )
    reached = f"{len(verdict.errors)} cells right, {verdict.unreached} not reached"
    if not verdict.problems:
        return head + reached
    lines = [f"  {cell}: {problem}" for cell, problem in verdict.problems.items()]
    return "\n".join([f"{head}{reached}, {len(verdict.problems)} cells WRONG", *lines])


def _timed(verdict: Verdict, ceilings: Ceilings) -> str:
    lines = [f"{verdict.seconds:5.0f} s {verdict.subject}"]
    for cell in verdict.subject.cells():
        if str(cell) in verdict.times:
            lines.append(time_line(verdict.subject.op, cell, verdict.times[str(cell)], ceilings))
        elif str(cell) in verdict.problems:
            lines.append(f"  {cell}: {verdict.problems[str(cell)]}")
    return "\n".join(lines)
