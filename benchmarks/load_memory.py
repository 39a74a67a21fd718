"""Peak resident memory of loading a checkpoint, mapped pages counted, in a fresh process.

Writes a random K3 checkpoint to a temporary directory, loads it as one rank in bf16 (the weights
as they are stored), and compares the growth over the imports with the weights plus one shard.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figure import Figure, Report, publish
from benchmarks.paths import ROOT
from tercel.cli.options import Json

GIB = 2**30


def main(
    size_bytes: Annotated[int, typer.Option(min=1, help="Of tensors, about.")] = 2 * GIB,
    shards: Annotated[int, typer.Option(min=1)] = 8,
    load_only: Annotated[Path | None, typer.Option("--load", hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """Peak resident memory of loading a checkpoint."""
    if load_only is not None:
        print(json.dumps(load(load_only)))
        return
    with tempfile.TemporaryDirectory(prefix="tercel-load-") as directory:
        result = measure(Path(directory) / "model", size_bytes, shards)
    publish(report(result), as_json)


def measure(model: Path, size_bytes: int, shards: int) -> dict[str, Any]:
    python: dict[str, Any] = {"check": True, "stdout": subprocess.PIPE, "cwd": ROOT}
    command = [sys.executable, "-m", "tercel", "checkpoint", "make-tiny", str(model)]
    options = ["--size-bytes", str(size_bytes), "--shards", str(shards)]
    subprocess.run([*command, *options], **python)
    largest = max(shard.stat().st_size for shard in model.glob("*.safetensors"))
    command = [sys.executable, "-m", "benchmarks.load_memory", "--load", str(model)]
    loaded = json.loads(subprocess.run(command, **python).stdout)
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


def report(result: dict[str, Any]) -> Report:
    def gib(name: str, key: str) -> Figure:
        return Figure(f"{name}, GiB", result[key] / GIB, form=".3f")

    budget = result["budget_bytes"] / GIB
    figures = (
        gib("weights", "weight_bytes"),
        gib("largest shard", "shard_bytes"),
        gib("imports", "baseline_bytes"),
        Figure(
            "peak over the imports, GiB (goal: weights + one shard)",
            result["peak_bytes"] / GIB,
            "<=",
            budget,
            ".3f",
        ),
        Figure("seconds", result["seconds"], form=".2f"),
    )
    settings = {"tensors": result["tensors"], "shards": result["shards"]}
    return Report("Loading a checkpoint: peak resident memory", figures, settings)


if __name__ == "__main__":
    typer.run(main)
