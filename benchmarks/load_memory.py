"""Peak resident memory of loading a checkpoint, mapped pages counted, in a fresh process.

    python benchmarks/load_memory.py [--size-bytes N] [--shards N] [--json]

Writes a random K3 checkpoint to a temporary directory, loads it as one rank in bf16 (the weights
as they are stored), and compares the growth over the imports with the weights plus one shard.
Exits with 1 where the growth is larger.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GIB = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak resident memory of loading a checkpoint.")
    parser.add_argument("--size-bytes", type=int, default=2 * GIB, help="of tensors, about")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load(options.load)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tercel-load-") as directory:
        result = measure(Path(directory) / "model", options.size_bytes, options.shards)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if result["peak_bytes"] <= result["budget_bytes"] else 1


def measure(model: Path, size_bytes: int, shards: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tercel", "checkpoint", "make-tiny", str(model)]
    options = ["--size-bytes", str(size_bytes), "--shards", str(shards)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    largest = max(shard.stat().st_size for shard in model.glob("*.safetensors"))
    command = [sys.executable, __file__, "--load", str(model)]
    loaded = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    budget = loaded["weight_bytes"] + largest
    return {**loaded, "shards": shards, "shard_bytes": largest, "budget_bytes": budget}


def load(model: Path) -> dict[str, Any]:
    """Runs in its own process: imports, then one load."""
    import torch

    from tercel.core.layout import Layout
    from tercel.core.model import ModelConfig
    from tercel.weights.checkpoint import Checkpoint
    from tercel.weights.load import load_model

    torch.set_num_threads(1)
    weight_bytes = 0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal weight_bytes
        weight_bytes = total_bytes

    baseline = status_bytes("VmRSS")
    start = time.perf_counter()
    config, checkpoint, cpu = ModelConfig.load(model), Checkpoint.open(model), torch.device("cpu")
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": cpu, "progress": progress}
    weights = load_model(checkpoint, config, Layout(), 0, **kind)
    seconds = time.perf_counter() - start
    peak = status_bytes("VmHWM") - baseline
    return {
        "layers": len(weights.layers),
        "tensors": len(checkpoint.tensors),
        "baseline_bytes": baseline,
        "weight_bytes": weight_bytes,
        "peak_bytes": peak,
        "seconds": seconds,
    }


def status_bytes(field: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak), mapped pages of files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def show(result: dict[str, Any]) -> None:
    table = Table("", "GiB", title=f"{result['tensors']:,} tensors in {result['shards']} shards")
    rows = {
        "weights": "weight_bytes",
        "largest shard": "shard_bytes",
        "weights + one shard": "budget_bytes",
        "peak over the imports": "peak_bytes",
        "imports": "baseline_bytes",
    }
    for label, key in rows.items():
        table.add_row(label, f"{result[key] / GIB:.3f}")
    table.add_row("seconds", f"{result['seconds']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
