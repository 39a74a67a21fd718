"""docs/benchmarks/h200.json: what programs on a GPU found; one entry per name, from one run."""

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tercel.contract.certify import tool_versions


def write(path: Path, name: str, result: dict[str, Any]) -> None:
    """Replaces the entry `name` of the results file `path`, which may not exist yet."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries[name] = {
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]).replace(
            str(path), path.name
        ),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": tool_versions(),
        **result,
    }
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _module() -> str:
    path = Path(sys.argv[0])
    return f"benchmarks.{path.stem}"
