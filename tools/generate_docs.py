"""Writes the generated pages: `make docs`. With --check, says whether they are current."""

import sys
from pathlib import Path

from benchmarks import gpu_page
from benchmarks.page import PAGE, RESULTS, render
from tercel.contract import PLAIN
from tercel.contract.receipt import status
from tercel.core.arch import Arch
from tercel.ops.catalog import catalog

ROOT = Path(__file__).parents[1]
HEADER = (
    "<!-- Written by tools/generate_docs.py; change the op folders, then run `make docs`. -->\n"
)


def op_table() -> str:
    """Every op: what it computes, its implementations, its cells and where it is certified."""
    archs = [arch for arch in Arch if arch is not Arch.CPU]
    lines = [
        HEADER,
        "# Ops\n",
        "Status per architecture follows from receipts: certified, stale, compiled, untested.\n",
        "| op | computes | implementations | cells | " + " | ".join(archs) + " |",
        "|---|---|---|---|" + "---|" * len(archs),
    ]
    for name, op in catalog().items():
        summary = (op.__doc__ or "").strip().splitlines()[0].rstrip(".")
        kernels = [n for n in op.implementations if n not in PLAIN]
        cells = len(op.contract.cells)
        states = [
            ", ".join(
                f"{kernel} {status(op, kernel, arch)}"
                for kernel in kernels
                if arch in op.implementation(kernel).archs
            )
            or "no kernel"
            for arch in archs
        ]
        names = ", ".join(op.implementations)
        lines.append(f"| {name} | {summary} | {names} | {cells} | " + " | ".join(states) + " |")
    return "\n".join(lines) + "\n"


PAGES = {
    "docs/ops.md": op_table,
    PAGE: lambda: render(ROOT / RESULTS),
    gpu_page.PAGE: lambda: gpu_page.render(ROOT / gpu_page.RESULTS),
    **{gpu_page.PLOTS[name]: build for name, build in gpu_page.PLOT_BUILDERS.items()},
}


def main(arguments: list[str]) -> int:
    stale = []
    for name, build in PAGES.items():
        path, text = ROOT / name, build()
        current = path.exists() and path.read_text(encoding="utf-8") == text
        if "--check" in arguments:
            stale += [] if current else [name]
        elif not current:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    if stale:
        print("not current: " + ", ".join(stale) + "; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
