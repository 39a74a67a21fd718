"""compute-sanitizer over every kernel: once, at its contract's smallest cell.

An op's kernels run one after the other in one process per tool, which is ended when it takes too
long. They run once without the sanitizer before, so that compilers are not watched.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Every tensor is an allocation of its own, so that what lies behind one is nobody's."""
PROCESSES = 10


def kernels(arch: Arch | None) -> Iterator[tuple[Op[..., Any], str, Cell]]:
    """(op, implementation, smallest cell) of every kernel for `arch`."""
    for op in catalog().values():
        for implementation in op.implementations.values():
            if implementation.name not in PLAIN and arch in implementation.archs:
                cells = [cell for cell in op.contract.cells if 0 not in cell.sizes.values()]
                yield op, implementation.name, min(cells, key=partial(size_of, op))


def size_of(op: Op[..., Any], cell: Cell) -> int:
    """Bytes of the cell's tensors."""
    drawn = draw(op, cell, dtype=torch.bfloat16)
    return sum(value.nbytes for value in drawn.values() if isinstance(value, torch.Tensor))


def run_op(name: str) -> None:
    """In a process under the sanitizer: the kernels alone, inputs drawn on the CPU."""
    for op, implementation, cell in kernels(arch_of(torch.device("cuda"))):
        if op.name == name:
            drawn = {
                key: value.cuda() if isinstance(value, torch.Tensor) else value
                for key, value in draw(op, cell, dtype=torch.bfloat16).items()
            }
            chosen = op.implementation(implementation)
            chosen.run(**packed(op, chosen, drawn, torch.bfloat16))
            torch.cuda.synchronize()
            print(f"ran {op.name} {implementation} {cell}", flush=True)


def sanitize(sanitizer: str, name: str, seconds: float) -> Iterator[dict[str, str]]:
    """What each tool says of an op's kernels, all within about `seconds`."""
    alone = [sys.executable, "-m", "benchmarks.sanitizer", "--op", name]
    code, text = run_bounded(alone, seconds)
    for tool in TOOLS:
        found = {"kernel": name, "cell": "", "tool": tool}
        if code != 0:
            yield {**found, "verdict": ended(code, text, "alone")}
            continue
        watched = [sanitizer, "--tool", tool, "--error-exitcode", str(FAILED)]
        watched += ["--target-processes", "application-only", *alone]
        code_here, text = run_bounded(watched, seconds)
        ran = re.findall(r"^ran \S+ (\S+) (.+)$", text, re.MULTILINE)
        found["kernel"] = f"{name} {', '.join(dict.fromkeys(kernel for kernel, _ in ran))}".strip()
        found["cell"] = ", ".join(dict.fromkeys(cell for _, cell in ran))
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
        if code_here == 0 and summary and ran:
            yield {**found, "verdict": "no errors"}
        elif summary and ran:
            print(text[-4000:], file=sys.stderr)
            yield {**found, "verdict": summary[-1]}
        else:
            yield {**found, "verdict": ended(code_here, text, f"under {tool}")}


def ended(code: int | None, text: str, where: str) -> str:
    """Why there is no verdict."""
    if code is None:
        return f"not done in time {where}"
    print(text[-2000:], file=sys.stderr)
    return f"ended with {code} {where}"


def run_bounded(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Exit status, None where the time was not enough, and all output; nothing is left running."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **UNCACHED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        return None, text
    return process.returncode, text


def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="OP", help="Ops by name; default: every one.")
    ] = None,
    op: Annotated[str | None, typer.Option(help="Run its kernels in this process.")] = None,
    out: Annotated[Path, typer.Option(help="Results file.")] = ROOT / "docs/benchmarks/h200.json",
    seconds: Annotated[float, typer.Option(help="Of one op under one tool.")] = 60.0,
) -> None:
    """Run every op's kernels under every tool, several at a time, and write the verdicts down."""
    if op is not None:
        run_op(op)
        return
    sanitizer = next((place for place in PLACES if place and Path(place).exists()), None)
    if sanitizer is None:
        raise typer.BadParameter("compute-sanitizer is not installed; it comes with the CUDA SDK")
    every = dict.fromkeys(op.name for op, *_ in kernels(arch_of(torch.device("cuda"))))
    wanted = [name for name in every if not names or name in names]
    found = []
    with ThreadPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as pool:
        for entries in pool.map(lambda name: list(sanitize(sanitizer, name, seconds)), wanted):
            for entry in entries:
                typer.echo(f"{entry['tool']:10} {entry['kernel']}: {entry['verdict']}")
                found.append(entry)
    write(out, "sanitizer", {"families": found})


if __name__ == "__main__":
    typer.run(main)
