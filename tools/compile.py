"""Cross-compiles every kernel for every GPU architecture, with no GPU: `make compile`.

Each launch that an op makes at its cells is compiled instead of run, so nothing is listed twice.
One process per architecture: an instruction that the compiler cannot select ends the process.
Writes docs/compiled.md and receipts that say compiled; with --check, says whether the code still is
what the page says.
"""

import argparse
import datetime
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tercel.contract import PLAIN, Cell, Implementation, Op
from tercel.contract.certify import bench_of, tool_versions
from tercel.contract.contract import DTYPES
from tercel.contract.receipt import Receipt, Status, content_hash, status, write_receipts
from tercel.core.arch import Arch
from tercel.ops.catalog import catalog

PAGE = Path(__file__).parents[1] / "docs/compiled.md"
TARGETS = {Arch.SM_90: 90, Arch.SM_100: 100, Arch.SM_103: 103, Arch.SM_107: 107}
SPILL_BYTES = {("_select", arch): 64 for arch in TARGETS}
"""(kernel, architecture) to the bytes that it may spill; otherwise none. The selection
loads its rows far ahead of their use."""
HEADER = """<!-- Written by tools/compile.py; run `make compile`. -->
# Compiled kernels

Triton {version}. One line per machine code: what the launches of an op's cells need in bf16.

| op | kernel | build | arch | registers | spilled bytes | shared bytes | code |
|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Build:
    """One kernel, compiled."""

    op: str
    kernel: str
    build: str
    """Compile-time arguments and warps."""
    arch: str
    registers: int
    spilled: int
    shared: int
    code: str
    """Hash of the machine code."""

    @property
    def line(self) -> str:
        return "| " + " | ".join(str(value) for value in asdict(self).values()) + " |"

    @property
    def allowed(self) -> int:
        return SPILL_BYTES.get((self.kernel, Arch(self.arch)), 0)


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
        return self._empty(count, dtype="i64")


def builds(arch: Arch) -> list[Build]:
    """Everything that the catalog's kernels launch on `arch`, each machine code once."""
    found: dict[str, Build] = {}
    for op, implementation, cell in _cells():
        arguments = op.arguments(**op.contract.inputs(cell, Shapes()))
        for kernel, build, compiled in _launched(implementation.run, arguments, arch):
            if compiled.hash not in found:
                resources = _resources(compiled)
                found[compiled.hash] = Build(op.name, kernel, build, arch.value, *resources)
    return list(found.values())


def _kernels() -> Iterator[tuple[Op[..., Any], Implementation]]:
    for op in catalog().values():
        for implementation in op.implementations.values():
            if implementation.name not in PLAIN:
                yield op, implementation


def _cells() -> Iterator[tuple[Op[..., Any], Implementation, Cell]]:
    for op, implementation in _kernels():
        for cell in (*op.contract.cells, *bench_of(op).cells):
            yield op, implementation, cell


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
            return 0

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


def _environment() -> dict[str, str]:
    """Compiled, not interpreted, and with the fusion of multiply and add that GPUs run with."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(PAGE.parents[1])}


def _of_every_arch() -> list[Build]:
    found = []
    for arch in TARGETS:
        command = [sys.executable, __file__, "--arch", arch.value]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env=_environment()
        )
        if result.returncode != 0:
            raise SystemExit(f"{arch}: the compiler failed\n{result.stderr[-4000:]}")
        found += [Build(**entry) for entry in json.loads(result.stdout)]
    return sorted(found, key=lambda build: (build.op, build.kernel, build.build))


def _write_receipts() -> None:
    """Says of each kernel that it compiles, except where it has run."""
    for op, implementation in _kernels():
        new = [
            Receipt(
                op=op.name,
                implementation=implementation.name,
                arch=arch,
                world_size=1,
                content_hash=content_hash(op, implementation.name),
                ran=False,
                device="",
                versions=tool_versions(),
                cells=(),
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            )
            for arch in TARGETS
            if status(op, implementation.name, arch) != Status.CERTIFIED
        ]
        write_receipts(op, new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=Arch, help="compile for one architecture, print JSON")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if different")
    options = parser.parse_args()
    if options.arch:
        print(json.dumps([asdict(build) for build in builds(options.arch)]))
        return 0
    found = _of_every_arch()
    text = HEADER.format(version=version("triton")) + "\n".join(b.line for b in found) + "\n"
    spilling = [build.line for build in found if build.spilled > build.allowed]
    if spilling:
        print("spills more than allowed:\n" + "\n".join(spilling), file=sys.stderr)
        return 1
    if options.check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("current" if current else f"{PAGE.name} is not current; run `make compile`")
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    _write_receipts()
    return 0


if __name__ == "__main__":
    sys.exit(main())
