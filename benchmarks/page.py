"""docs/benchmarks/cpu.md as a function of docs/benchmarks/cpu.json, which report.py writes.

The page holds nothing else, so that a number on it was measured by the command that stands below.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.figure import COLUMNS, Report, joined

RESULTS = "docs/benchmarks/cpu.json"
PAGE = "docs/benchmarks/cpu.md"
INTRODUCTION = """\
<!-- Written from cpu.json by tools/generate_docs.py; measure with `make bench`. -->
# Figures on a CPU

Each table is the latest run of its command, on the machine and versions below it. A figure with a
goal is *met* or *missed*; one that needs something absent is *not run*; the others are for reading.
Relative error is max|a - b| / max|b|.
"""


def render(results: Path) -> str:
    """The page of a results file, which may not exist yet."""
    entries = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    return "\n".join([INTRODUCTION, *map(section, entries.values())])


def section(entry: dict[str, Any]) -> str:
    report = Report.from_dict(entry["report"])
    rows = [figure.row() for figure in report.figures]
    lines = [
        f"## {report.title}\n",
        *(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---", "---:", "---:", "---"), *rows)),
        "",
        f"`{entry['command']}`, {entry['date']}, {entry['seconds']:,.0f} s",
    ]
    for details in map(joined, (report.settings, entry["machine"], entry["versions"])):
        if details:
            lines += ["", details]
    return "\n".join(lines) + "\n"
