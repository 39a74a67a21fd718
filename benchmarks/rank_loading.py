"""Loading: bytes that a rank reads of a checkpoint, and the speed of one rank beside `cat`.

Writes a random K3 checkpoint, loads the ranks of tp4 and one whole rank in bf16 (the weights as
they are stored), each in a fresh process, and reads the same files with `cat`, in the order
A B B A. Files are put out of the page cache first where the system does that, and once more left
in it.
"""

import json
import math
import os
import statistics
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
LAYOUT = "tp4"


def main(
    size_bytes: Annotated[int, typer.Option(min=1, help="Of tensors, about.")] = 2 * 10**9,
    shards: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    load_only: Annotated[Path | None, typer.Option("--load", hidden=True)] = None,
    layout: Annotated[str, typer.Option(hidden=True)] = "tp1",
    rank: Annotated[int, typer.Option(hidden=True)] = 0,
    as_json: Json = False,
) -> None:
    """Bytes that ranks read, and the speed of loading beside cat."""
    if load_only is not None:
        print(json.dumps(load(load_only, layout, rank)))
        return
    with tempfile.TemporaryDirectory(prefix="tercel-load-") as directory:
        model = Path(directory) / "model"
        make = ["checkpoint", "make-tiny", str(model), "--size-bytes", str(size_bytes)]
        python("tercel", *make, "--shards", str(shards))
        os.sync()  # or the disk is busy writing them while they are read
        figures = (*bytes_per_rank(model), *speed(model, rounds))
    settings: dict[str, Any] = {"size_bytes": size_bytes, "shards": shards, "rounds": rounds}
    settings["load average"] = f"{os.getloadavg()[0]:.1f}"
    publish(Report("Loading by rank", figures, settings), as_json)


def bytes_per_rank(model: Path) -> tuple[Figure, ...]:
    """What every rank of tp4 reads, against a quarter of what ranks divide plus all else."""
    from tercel.core.layout import Layout
    from tercel.core.model import read_config_json
    from tercel.weights.rank_manifest import rank_manifest

    layout, figures = Layout.parse(LAYOUT), []
    whole = rank_manifest(read_config_json(model), Layout(), 0).num_bytes
    for rank in range(layout.world_size):
        sharing = rank_manifest(read_config_json(model), layout, rank).by("sharing")
        replicated = sharing["replicated"]["bytes"]
        goal = 1.05 * ((whole - replicated) / layout.tp + replicated)
        seen = loaded(model, LAYOUT, rank)
        own, read = seen["bytes"] / 1e6, seen["read_bytes"] / 1e6
        figures += [
            Figure(f"{LAYOUT} rank {rank}, MB of its slices", own, "<=", goal / 1e6, ".1f"),
            Figure(f"{LAYOUT} rank {rank}, MB read, between its rows too", read, form=".1f"),
        ]
    figures.append(Figure("replicated, MB on every rank", replicated / 1e6, form=".1f"))
    figures.append(Figure("whole checkpoint, MB", whole / 1e6, form=".1f"))
    return tuple(figures)


def speed(model: Path, rounds: int) -> tuple[Figure, ...]:
    """GB/s of one rank and of cat, from the page cache and from the disk."""
    size, figures = sum(shard.stat().st_size for shard in model.glob("*.safetensors")), []
    for name, prepare in (("page cache", warm), ("disk", evict)):
        seconds: dict[str, list[float]] = {"cat": [], "load": []}
        for turn in range(rounds):
            for what in ("cat", "load") if turn % 2 == 0 else ("load", "cat"):
                prepare(model)
                seconds[what].append(cat(model) if what == "cat" else loaded(model)["seconds"])
        best = {what: statistics.median(values) for what, values in seconds.items()}
        figures += [
            Figure(f"cat from the {name}, GB/s", size / best["cat"] / 1e9, form=".2f"),
            Figure(f"one rank from the {name}, GB/s", size / best["load"] / 1e9, form=".2f"),
            Figure(f"ratio to cat, {name}", best["cat"] / best["load"], form=".2f"),
        ]
    return tuple(figures)


def cat(model: Path) -> float:
    """Seconds to read every shard into nothing."""
    start = time.perf_counter()
    shards = sorted(map(str, model.glob("*.safetensors")))
    with subprocess.Popen(["cat", *shards], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.read(1 << 20):
            pass
    return time.perf_counter() - start


def warm(model: Path) -> None:
    cat(model)


def evict(model: Path) -> None:
    """Asks the system to forget the files' pages; it may not."""
    for shard in model.glob("*.safetensors"):
        with shard.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loaded(model: Path, layout: str = "tp1", rank: int = 0) -> dict[str, Any]:
    arguments = ["--load", str(model), "--layout", layout, "--rank", str(rank)]
    result: dict[str, Any] = json.loads(python("benchmarks.rank_loading", *arguments))
    return result


def python(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, text=True).stdout


def load(model: Path, layout: str, rank: int) -> dict[str, Any]:
    """Runs in its own process: imports, then one load."""
    import torch

    from tercel.core.layout import Layout
    from tercel.core.model import ModelConfig
    from tercel.weights.checkpoint import Checkpoint
    from tercel.weights.load import load_model

    num_bytes = 0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal num_bytes
        num_bytes = done_bytes

    read_before, start = bytes_read(), time.perf_counter()
    config, checkpoint, cpu = ModelConfig.load(model), Checkpoint.open(model), torch.device("cpu")
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": cpu, "progress": progress}
    weights = load_model(checkpoint, config, Layout.parse(layout), rank, **kind)
    seconds = time.perf_counter() - start
    return {
        "bytes": num_bytes,
        "read_bytes": bytes_read() - read_before,
        "seconds": seconds,
        "layers": len(weights.layers),
    }


def bytes_read() -> int | float:
    """Of files by this process so far, from the page cache or not; NaN where Linux is not."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return math.nan
    return int(counters.read_text().partition("rchar: ")[2].split()[0])


if __name__ == "__main__":
    typer.run(main)
