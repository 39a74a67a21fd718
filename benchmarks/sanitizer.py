"""compute-sanitizer over every kernel family: each kernel once, at its contract's smallest cell.

A family is a category of the catalog; its kernels run one after the other in one process per tool.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu_results import write
from benchmarks.paths import ROOT
from tercel.contract import PLAIN, Cell, Op
from tercel.contract.check import draw, packed
from tercel.core.arch import Arch, arch_of
from tercel.ops.catalog import catalog

TOOLS = ("memcheck", "racecheck")
PLACES = (shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer")
FAILED = 99
"""What compute-sanitizer exits with where it finds an error."""


def kernels(arch: Arch | None) -> Iterator[tuple[str, Op[..., Any], str, Cell]]:
    """(family, op, implementation, smallest cell) of every kernel for `arch`."""
    for name, op in catalog().items():
        for implementation in op.implementations.values():
            if implementation.name not in PLAIN and arch in implementation.archs:
                cells = [cell for cell in op.contract.cells if 0 not in cell.sizes.values()]
                cell = min(cells, key=partial(size_of, op))
                yield name.partition("/")[0], op, implementation.name, cell


def size_of(op: Op[..., Any], cell: Cell) -> int:
    """Bytes of the cell's tensors."""
    drawn = draw(op, cell, dtype=torch.bfloat16)
    return sum(value.nbytes for value in drawn.values() if isinstance(value, torch.Tensor))


def run_family(family: str) -> None:
    """In a process under the sanitizer: the kernels alone, inputs drawn on the CPU."""
    for each, op, name, cell in kernels(arch_of(torch.device("cuda"))):
        if each == family:
            drawn = {
                key: value.cuda() if isinstance(value, torch.Tensor) else value
                for key, value in draw(op, cell, dtype=torch.bfloat16).items()
            }
            chosen = op.implementation(name)
            chosen.run(**packed(op, chosen, drawn, torch.bfloat16))
            torch.cuda.synchronize()
            print(f"ran {op.name} {name} {cell}", flush=True)


def sanitize(sanitizer: str, family: str, tool: str, seconds: float) -> dict[str, str]:
    """What the tool says of a family."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FAILED)]
    command += [sys.executable, "-m", "benchmarks.sanitizer", "--family", family]
    entry = {"kernel": family, "cell": "", "tool": tool}
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {**entry, "verdict": f"not done within {seconds:.0f} s"}
    ran = re.findall(r"^ran (\S+ \S+) (.+)$", done.stdout, re.MULTILINE)
    entry["kernel"] = f"{family}: {', '.join(dict.fromkeys(name for name, _ in ran))}"
    entry["cell"] = ", ".join(cell for _, cell in ran)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", done.stdout + done.stderr)
    if done.returncode == 0 and summary:
        return {**entry, "verdict": "no errors"}
    print(done.stdout[-3000:], done.stderr[-2000:], file=sys.stderr)
    return {**entry, "verdict": summary[-1] if summary else f"ended with {done.returncode}"}


def main(
    family: Annotated[str | None, typer.Option(help="Run its kernels in this process.")] = None,
    out: Annotated[Path, typer.Option(help="Results file.")] = ROOT / "docs/benchmarks/h200.json",
    seconds: Annotated[float, typer.Option(help="Of one family under one tool.")] = 100.0,
) -> None:
    """Run every family under every tool, several at a time, and write the verdicts down."""
    if family is not None:
        run_family(family)
        return
    sanitizer = next((place for place in PLACES if place and Path(place).exists()), None)
    if sanitizer is None:
        raise typer.BadParameter("compute-sanitizer is not installed; it comes with the CUDA SDK")
    families = sorted({each for each, *_ in kernels(arch_of(torch.device("cuda")))})
    jobs = [(each, tool) for tool in TOOLS for each in families]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        found = list(pool.map(lambda job: sanitize(sanitizer, *job, seconds), jobs))
    for entry in found:
        typer.echo(f"{entry['tool']:10} {entry['kernel']}: {entry['verdict']}")
    write(out, "sanitizer", {"families": found})


if __name__ == "__main__":
    typer.run(main)
