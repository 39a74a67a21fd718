"""compute-sanitizer over every kernel: once, at its smallest cell.

memcheck runs all kernels of an op in one process; racecheck, which is far slower, those whose
source manages shared memory itself. A process is ended when it takes too long; one that has
compiled its kernels under memcheck finds them compiled under racecheck. Compilers are processes of
their own and are not watched.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu_results import write
from benchmarks.paths import ROOT
from tercel.contract import PLAIN, Cell, Op
from tercel.contract.check import packed
from tercel.contract.draw import draw
from tercel.core.arch import arch_of
from tercel.ops.attention.mla_decode.contract import HEAD
from tercel.ops.catalog import catalog

TOOLS = ("memcheck", "racecheck")
SHARED = ("gluon", "gluon_sm_90")
"""Implementations that manage shared memory themselves."""
PLACES = (shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer")
FAILED = 99
"""What compute-sanitizer exits with where it finds an error."""
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Every tensor is an allocation of its own, so that what lies behind one is nobody's."""
PROCESSES = 16
TINY: Mapping[str, Cell] = {
    "mla_decode": Cell(
        "entries that no parts divide evenly; pages that Gluon's kernel serves",
        (),
        **HEAD,
        **{"H": 6, "PS": 64, "PAGES": 6, "width": 1, "gated": True},
        contexts=(150, 0),
    ),
    "mla_decode gluon_sm_90": Cell(
        "query rows that do not fill their block, tiles that no parts divide evenly",
        (),
        **HEAD,
        **{"H": 40, "PS": 64, "PAGES": 6, "width": 1, "gated": True},
        contexts=(150, 0),
    ),
    "mla_prefill": Cell(
        "two sequences, one of them a token, behind entries of earlier steps",
        (),
        **{"H": 2, "K": 32, "V": 32, "L": 32, "E": 48, "PS": 16, "PAGES": 8, "gated": True},
        **{"cu_seqlens": (0, 20, 21), "context_lens": (30, 3)},
    ),
    "gemv": Cell("rows in a ring", T=1, K=256, M=512, sigmoid_from=None),
    "experts_decode": Cell("more than 32 tokens", T=40, k=2, E=4, L=512, I=512, mxfp4=True),
    "experts_grouped": Cell("a stream of blocks", T=100, k=2, E=2, L=768, I=768, mxfp4=True),
    "experts_grouped_e4m3": Cell("a stream of blocks", T=100, k=2, E=2, L=768, I=768),
    **{
        name: Cell("a cluster of blocks", S=8, T=1, N=7168, **more)
        for name, more in {
            "attn_res": {},
            "attn_res_rms_norm": {},
            "add_attn_res_rms_norm": {"prefix": True},
        }.items()
    },
}
"""Cells of ops, or of implementations of them, whose contracts have no cell that is small and runs
their kernels."""


def ops() -> dict[str, Op[..., Any]]:
    """Ops by their names."""
    return {op.name: op for op in catalog().values()}


def kernels(op: Op[..., Any], tool: str) -> list[str]:
    """The implementations of an op that run under a tool on this GPU."""
    arch = arch_of(torch.device("cuda"))
    return [
        each.name
        for each in op.implementations.values()
        if each.name not in PLAIN
        and arch in each.archs
        and (tool == "memcheck" or each.name in SHARED)
    ]


def smallest(op: Op[..., Any], implementation: str) -> Cell:
    cells = [cell for cell in op.contract.cells if 0 not in cell.sizes.values()]
    chosen = TINY.get(f"{op.name} {implementation}") or TINY.get(op.name)
    return chosen or min(cells, key=partial(size_of, op))


def size_of(op: Op[..., Any], cell: Cell) -> int:
    """Bytes of the cell's tensors."""
    drawn = draw(op, cell, dtype=torch.bfloat16)
    return sum(value.nbytes for value in drawn.values() if isinstance(value, torch.Tensor))


def run_op(name: str, tool: str) -> None:
    """In a process under the sanitizer: the kernels alone, inputs drawn on the CPU."""
    print(f"at the inputs of {name}", flush=True)
    op = ops()[name]
    for implementation in kernels(op, tool):
        cell = smallest(op, implementation)
        drawn = {
            key: value.cuda() if isinstance(value, torch.Tensor) else value
            for key, value in draw(op, cell, dtype=torch.bfloat16).items()
        }
        chosen = op.implementation(implementation)
        print(f"at {name} {implementation}", flush=True)
        chosen.run(**packed(op, chosen, drawn, torch.bfloat16))
        torch.cuda.synchronize()
        print(f"ran {name} {implementation} {cell}", flush=True)


def verdicts(sanitizer: str, name: str, seconds: float) -> list[dict[str, str]]:
    """What each tool says of an op's kernels, each within `seconds`."""
    found = []
    for tool in TOOLS:
        names = kernels(ops()[name], tool)
        if not names:
            continue
        watched = [sanitizer, "--tool", tool, "--error-exitcode", str(FAILED)]
        watched += ["--target-processes", "application-only"]
        watched += [sys.executable, "-m", "benchmarks.sanitizer", name, "--under", tool]
        start = time.monotonic()
        code, text = run_bounded(watched, seconds)
        ran = re.findall(r"^ran \S+ (\S+) (.+)$", text, re.MULTILINE)
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
        complete = [kernel for kernel, _ in ran] == names
        if code == 0 and summary and complete:
            verdict = "no errors"
        elif summary and complete:
            print(text[-4000:], file=sys.stderr)
            verdict = summary[-1]
        else:
            verdict = ended(code, text)
        found.append(
            {
                "kernel": f"{name} {', '.join(names)}",
                "cell": ", ".join(dict.fromkeys(cell for _, cell in ran)),
                "tool": tool,
                "verdict": verdict,
                "seconds": f"{time.monotonic() - start:.0f}",
            }
        )
    return found


def ended(code: int | None, text: str) -> str:
    """Why there is no verdict."""
    if code is None:
        steps = re.findall(r"^at .+$", text, re.MULTILINE)
        return f"not done in time, {steps[-1] if steps else 'at the start'}"
    print(text[-2000:], file=sys.stderr)
    return f"ended with {code}"


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
    under: Annotated[
        str | None, typer.Option(help="Run what this tool watches of the ops in this process.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Results file.")] = ROOT / "docs/benchmarks/h200.json",
    seconds: Annotated[float, typer.Option(help="Of one op under one tool.")] = 60.0,
) -> None:
    """Run every op's kernels under every tool, several at a time, and write the verdicts down."""
    if under is not None:
        for name in names or ():
            run_op(name, under)
        return
    sanitizer = next((place for place in PLACES if place and Path(place).exists()), None)
    if sanitizer is None:
        raise typer.BadParameter("compute-sanitizer is not installed; it comes with the CUDA SDK")
    wanted = names or list(ops())
    found = []
    with ThreadPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as pool:
        started = [pool.submit(verdicts, sanitizer, name, seconds) for name in wanted]
        for done in as_completed(started):
            for entry in done.result():
                took = f"{entry['verdict']} ({entry['seconds']} s)"
                typer.echo(f"{entry['tool']:10} {entry['kernel']}: {took}")
                found.append(entry)
            found.sort(key=lambda entry: entry["kernel"])
            write(out, "sanitizer", {"families": found})


if __name__ == "__main__":
    typer.run(main)
