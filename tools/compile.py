"""Cross-compiles every kernel for every GPU architecture, with no GPU: `make compile`.

Each launch that an op makes at its cells is compiled instead of run, so nothing is listed twice;
ops whose source and cells are those of the page are not compiled again. Writes docs/compiled.md and
receipts that say compiled. With --check, compiles one cell of each kernel, for the architectures in
turn, to see that it compiles within its allowance and that the code still is the page's; kernels
that have changed since are named.
"""

import argparse
import datetime
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tercel.contract import PLAIN, Cell
from tercel.contract.certify import tool_versions
from tercel.contract.check import packed
from tercel.contract.contract import DTYPES
from tercel.contract.jobs import Subject
from tercel.contract.receipt import Receipt, Status, content_hash, status, write_receipts
from tercel.contract.workers import run_jobs
from tercel.core.arch import Arch
from tercel.ops.catalog import catalog

PAGE = Path(__file__).parents[1] / "docs/compiled.md"
TARGETS = {Arch.SM_90: 90, Arch.SM_100: 100, Arch.SM_103: 103, Arch.SM_107: 107}
MAY_SPILL = {
    "_select": 1664,
    "prepare": 512,
    "_attend": 512,
    "attend_parts": 256,
    "_accept": 256,
    "_attend_few": 136,
    "attend_many": 16,
    "_down_tiles": 72,
    "_gate_up_tiles": 72,
    "_absorb": 64,
    "_write_head": 40,
    "wide": 24,
    "_attend_window": 16,
    "_compose": 16,
    "_multiply": 256,
    "_stream": 72,
    "_tiles_product": 16,
    "stream": 8,
    "ring": 40,
    "_chain": 24,
}
SPILL_BYTES = {(kernel, arch): size for kernel, size in MAY_SPILL.items() for arch in TARGETS}
"""(kernel, architecture) to the bytes that it may spill; otherwise none. The selection keeps tiles
of rows on their way, too many with nine snapshots and more; turned queries want sines of large fp64
angles; attention of 48 query rows and more, of draft blocks too, holds 128 registers of sums; that
of few, its queries; KDA's chunks are faster on two warps that spill than on four that do not; the
experts' tiles on 64 registers, that more programs may run; sorted slots on warpgroups by Triton
3.9, where 3.6 spills 24 or nothing."""
JOB_S = 1200.0
"""One kernel on one architecture, on a busy machine."""
HEADER = """<!-- Written by tools/compile.py; run `make compile`. -->
# Compiled kernels

Triton {version}. One line per machine code: what the launches of an op's cells need in bf16, and
what they may spill. Source: the hash of an implementation's source and cells.

| implementation | source |
|---|---|
{sources}

| op | kernel | build | arch | registers | spilled bytes | allowed | shared bytes | code |
|---|---|---|---|---|---|---|---|---|
{builds}
"""


@dataclass(frozen=True)
class Build:
    """One kernel, compiled."""

    op: str
    """Op and implementation."""
    kernel: str
    build: str
    """Compile-time arguments and warps."""
    arch: str
    registers: int
    spilled: int
    allowed: int
    shared: int
    code: str
    """Hash of the machine code."""

    @property
    def line(self) -> str:
        return "| " + " | ".join(str(getattr(self, item.name)) for item in fields(self)) + " |"

    @classmethod
    def of_line(cls, line: str) -> "Build":
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        values = [int(c) if f.type is int else c for f, c in zip(fields(cls), cells, strict=True)]
        return cls(*values)


@dataclass(frozen=True)
class CompileJob:
    """An implementation's cells for one architecture."""

    subject: Subject
    arch: Arch
    cells: tuple[Cell, ...]


class Shapes:
    """Draws a cell's inputs without their contents."""

    def __init__(self) -> None:
        self.normal = self.uniform = self.poison = self._empty

    def _empty(self, *shape: int, dtype: str = "act", **_: Any) -> torch.Tensor:
        wanted = torch.bfloat16 if dtype == "act" else DTYPES[dtype]
        return torch.empty(shape, dtype=wanted, device="meta")

    def integers(self, *shape: int, dtype: str = "i64", **_: Any) -> torch.Tensor:
        return self._empty(*shape, dtype=dtype)

    def choice(self, count: int, *, low: int, high: int) -> torch.Tensor:
        return self.integers(count)


def compile_job(job: CompileJob) -> list[Build]:
    """Everything that an op launches at the cells, each machine code once."""
    op, name = job.subject.op, job.subject.implementation
    implementation, found = op.implementation(name), {}
    for cell in job.cells:
        drawn = op.arguments(**op.contract.inputs(cell, Shapes()))
        arguments = packed(op, implementation, drawn, torch.bfloat16)
        for kernel, build, compiled in _launched(implementation.run, arguments, job.arch):
            if compiled.hash not in found:
                registers, spilled, shared, code = _resources(compiled)
                allowed = SPILL_BYTES.get((kernel, job.arch), 0)
                sizes = (registers, spilled, allowed, shared)
                named = (str(job.subject), kernel, build, job.arch.value)
                found[compiled.hash] = Build(*named, *sizes, code)
    return list(found.values())


def subjects() -> Iterator[Subject]:
    """Every kernel of the catalog."""
    for op in catalog().values():
        for name in op.implementations:
            if name not in PLAIN:
                yield Subject.of(op, name)


def source_of(subject: Subject) -> str:
    """Changes with whatever decides what is compiled."""
    cells = " ".join(map(str, subject.cells()))
    text = f"{content_hash(subject.op, subject.implementation)} {cells}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _launched(
    run: Callable[..., Any], arguments: dict[str, Any], arch: Arch
) -> list[tuple[str, str, Any]]:
    """(kernel, build, compiled kernel) of every launch in one call."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Nowhere:
        """A driver with a target and no device."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", TARGETS[arch], 32)

        def get_current_device(self) -> int:
            return TARGETS[arch]  # one of its own: kernels keep their code by device

        def get_current_stream(self, device: int) -> int:
            return 0

    launches = []

    def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            chosen = {n: v for n, v in options.items() if n.isupper() or n == "num_warps"}
            text = " ".join(f"{name}={value}" for name, value in chosen.items())
            launches.append((kernel.__name__, text, compiled))

        return launch

    triton.runtime.driver.set_active(Nowhere())
    triton.runtime.jit.KernelInterface.__getitem__ = compile_only
    run(**arguments)
    return launches


def _resources(compiled: Any) -> tuple[int, int, int, str]:
    """Registers, spilled bytes and shared bytes, as cuobjdump reads them, and the code's hash."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output(str(tool), "--dump-resource-usage", file.name)
    fields = dict(part.split(":") for part in usage.split() if part.count(":") == 1 and part[-1:])
    spilled = int(fields["STACK"]) + int(fields["LOCAL"])
    digest = hashlib.sha256(_code(compiled.asm["cubin"])).hexdigest()[:12]
    return int(fields["REG"]), spilled, compiled.metadata.shared, digest


def _code(binary: bytes) -> bytes:
    """The instructions of a cubin, a 64-bit ELF file: its .text sections."""
    (start,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, start + size * i) for i in range(count)]
    text = headers[names][4]
    return b"".join(
        binary[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if binary[text + name :].startswith(b".text")
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiled(jobs: Sequence[CompileJob]) -> list[Build]:
    """The builds of all jobs, compiled in as many processes as there are cores. An instruction that
    the compiler cannot select ends its process."""
    os.environ.update(TRITON_DEFAULT_FP_FUSION="1")  # as GPUs run with
    os.environ.pop("TRITON_INTERPRET", None)
    deadline, found, problems = time.monotonic() + 10 * JOB_S, [], []
    processes = os.cpu_count() or 1
    for done in run_jobs(compile_job, jobs, processes=processes, deadline=deadline, job_s=JOB_S):
        if done.result is None:
            problems.append(f"{done.job.subject} for {done.job.arch}: {done.problem}")
        else:
            found += done.result
    if problems:
        raise SystemExit("\n".join(problems))
    return found


def jobs_of(chosen: Iterable[Subject]) -> list[CompileJob]:
    """Every cell of the chosen for every architecture."""
    return [
        CompileJob(subject, arch, subject.cells())
        for subject in chosen
        for arch in _targets(subject)
    ]


def sample_of(chosen: Iterable[Subject]) -> list[CompileJob]:
    """One cell of each of the chosen for one architecture, the architectures in turn."""
    return [
        CompileJob(subject, targets[index % len(targets)], subject.cells()[:1])
        for index, subject in enumerate(chosen)
        if (targets := _targets(subject))
    ]


def _targets(subject: Subject) -> list[Arch]:
    return [
        arch for arch in TARGETS if arch in subject.op.implementation(subject.implementation).archs
    ]


def read_page() -> tuple[dict[str, str], list[Build]]:
    """(implementation to source, builds) of the page; empty where another Triton wrote it."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if f"Triton {version('triton')}." not in text:
        return {}, []
    sources = dict(re.findall(r"^\| (\w+ \w+) \| ([0-9a-f]{16}) \|$", text, re.MULTILINE))
    rows = [line for line in text.splitlines() if line.count(" | ") == len(fields(Build)) - 1]
    return sources, [Build.of_line(line) for line in rows[1:]]


def write_page(sources: Mapping[str, str], builds: Iterable[Build]) -> None:
    ordered = sorted(builds, key=lambda build: (build.op, build.kernel, build.build, build.arch))
    text = HEADER.format(
        version=version("triton"),
        sources="\n".join(f"| {name} | {source} |" for name, source in sorted(sources.items())),
        builds="\n".join(build.line for build in ordered),
    )
    PAGE.write_text(text, encoding="utf-8")


def write_compiled_receipts(chosen: Iterable[Subject]) -> None:
    """Says of each kernel that it compiles, except where it has run."""
    for subject in chosen:
        op, name = subject.op, subject.implementation
        new = [
            Receipt(
                op=op.name,
                implementation=name,
                arch=arch,
                world_size=1,
                content_hash=content_hash(op, name),
                ran=False,
                device="",
                versions=tool_versions(),
                cells=(),
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            )
            for arch in TARGETS
            if arch in op.implementation(name).archs and status(op, name, arch) != Status.CERTIFIED
        ]
        write_receipts(op, new)


def stale() -> list[str]:
    """Kernels whose source or cells are not those of the page, and what the page has too many."""
    sources, _ = read_page()
    present = {str(subject): source_of(subject) for subject in subjects()}
    return sorted(n for n in {**present, **sources} if present.get(n) != sources.get(n))


def check() -> list[str]:
    """What is wrong with the code of one cell of each kernel, or unlike the page."""
    _, builds = read_page()
    changed, written = set(stale()), set(builds)
    if changed:
        print(f"not compiled since they changed: {', '.join(sorted(changed))}", file=sys.stderr)
    again = compiled(sample_of(subjects()))
    unlike = [b for b in again if b not in written and b.op not in changed]
    return [f"compiles to other code: {b.line}" for b in unlike] + _spilling([*again, *builds])


def _spilling(builds: Iterable[Build]) -> list[str]:
    return [f"spills too much: {b.line}" for b in builds if b.spilled > b.allowed]


def update(every: bool) -> list[str]:
    """Brings the page and the receipts up to date, kernel by kernel, so that a run which is
    stopped keeps what it has done; what is wrong with the code."""
    sources, builds = read_page()
    present = {str(subject): subject for subject in subjects()}
    waiting = {*stale(), *(present if every else ())}
    sources = {name: source for name, source in sources.items() if name not in waiting}
    builds = [build for build in builds if build.op in sources]
    waiting &= present.keys()  # others are gone
    for name in sorted(waiting, key=lambda name: (len(present[name].cells()), name)):
        builds += compiled(jobs_of([present[name]]))
        sources[name] = source_of(present[name])
        write_page(sources, builds)
        if not _spilling(build for build in builds if build.op == name):
            write_compiled_receipts([present[name]])
        print(f"{name}: {sum(build.op == name for build in builds)} builds", flush=True)
    return _spilling(builds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if different")
    parser.add_argument("--all", action="store_true", help="also what has not changed")
    options = parser.parse_args()
    problems = check() if options.check else update(options.all)
    if problems:
        print("\n".join([*problems, "run `make compile`"]), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
