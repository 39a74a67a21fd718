"""`tercel bench`: times kernels on this machine's GPU, and certifies nothing."""

import time
from typing import Annotated

import msgspec
import typer

from tercel.cli.kernels import ceilings, gpu_arch, kernels, named_ops, time_line
from tercel.cli.options import Json
from tercel.contract.bench import bench_of
from tercel.contract.certify import PEER_SHARE
from tercel.contract.jobs import TimeJob, ends, with_peers
from tercel.errors import ConfigError

app = typer.Typer(add_completion=False)
PROCESSES = 8
"""That try peers at the same time."""


@app.command(name="bench")
def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="OP", help="Ops by name; default: every one.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only cells whose name contains this.")] = "",
    peers: Annotated[bool, typer.Option(help="Time the installed public kernels too.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="All that it may take.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Time kernels at the cells of their benches, beside baselines and peers."""
    subjects = kernels(named_ops(names), gpu_arch("bench"), every=True)
    deadline, limits = time.monotonic() + seconds, ceilings()
    jobs = [
        TimeJob(subject, cell)
        for subject in subjects
        for cell in bench_of(subject.op).every_cell
        if only in str(cell)
    ]
    if not jobs:
        raise ConfigError(
            f"only: {only!r} is in no cell's name; `tercel bench OP` prints the names"
        )
    if peers:
        jobs = with_peers(jobs, PROCESSES, time.monotonic() + PEER_SHARE * seconds)
    for done in ends(jobs, 1, deadline):
        job = done.job
        if as_json:
            entry = {"op": job.subject.name, "implementation": job.subject.implementation}
            found = {"cell": str(job.cell), "time": done.result, "problem": done.problem}
            typer.echo(msgspec.json.encode({**entry, **found, "ceilings": limits}).decode())
        elif done.result is None:
            typer.echo(f"{job.subject}\n  {job.cell}: {done.problem}")
        else:
            line = time_line(job.subject.op, job.cell, done.result, limits)
            typer.echo(f"{job.subject}\n{line}")
