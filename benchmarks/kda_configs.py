"""Times launch configurations of kda_decode and kda_verify on this GPU beside fla's
recurrence alone, to fill their tables.

Right first: a configuration whose result is off is named and not timed. Run from the repository's
root: python benchmarks/kda_configs.py OP compile, which takes all processors, and then
python benchmarks/kda_configs.py OP [HEADSxROWS ...].
"""

import importlib
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tercel.contract import Cell, Op
from tercel.contract.bench import COLD_BYTES, bench_of
from tercel.contract.compare import compare
from tercel.contract.draw import Maker
from tercel.contract.timing import copy_bandwidth, in_graph, interleave
from tercel.ops._lib.kda import HEAD, Tiles
from tercel.ops.catalog import catalog

CELLS = ("6x1", "6x8", "6x64", "32x8", "96x1", "96x8", "96x64")
TILES = {
    "kda_decode": (
        Tiles(64, 4, 4, prefetch=True),
        Tiles(64, 4, 4),
        Tiles(64, 2, 4),
        Tiles(32, 4, 4),
        Tiles(32, 2, 4),
        Tiles(32, 1, 4),
        Tiles(32, 2, 2),
        Tiles(64, 2, 8),
    ),
    "kda_verify": (
        Tiles(128, 4, 16),
        Tiles(128, 4, 8),
        Tiles(64, 4, 8),
        Tiles(64, 4, 4),
        Tiles(32, 4, 4),
        Tiles(32, 2, 4),
    ),
}
WIDTH = 8
PROCESSES = 12
MOST_CALLS = 256
SHOWN = 7


def runner(op: Op[..., Any], tiles: Tiles) -> Callable[..., Any]:
    """The op's kernel with one configuration whatever the call."""
    module = importlib.import_module(f"{op.folder}.kernel_triton")

    def run(**arguments: Any) -> torch.Tensor:
        module.TILES = ((1 << 30, tiles),)
        return getattr(module, op.name)(**arguments)  # type: ignore[no-any-return]

    return run


def compile_tiles(job: tuple[str, Tiles]) -> None:
    """First calls, whose machine code lands in Triton's cache on disk."""
    op = catalog()[f"linear_attention/{job[0]}"]
    for heads in sorted({int(cell.split("x")[0]) for cell in CELLS}):
        try:
            runner(op, job[1])(**draw_cell(op, heads, 2))
        except Exception as error:
            print(f"{job}: {str(error)[-300:]}", flush=True)
            return


def draw_cell(op: Op[..., Any], heads: int, rows: int) -> dict[str, Any]:
    sizes = {"R": rows, "H": heads, "SLOTS": rows + 1, "lower_bound": -5.0, **HEAD}
    sizes |= {"S": 3} if op.name == "kda_decode" else {"D": WIDTH - 1, "width": WIDTH}
    maker = Maker(0, torch.bfloat16, "cuda")
    return op.arguments(**op.contract.inputs(Cell("", **sizes), maker))


def copies(a: dict[str, Any], count: int) -> list[dict[str, Any]]:
    tensors = {n: v for n, v in a.items() if isinstance(v, torch.Tensor) and n != "conv_weight"}
    return [{**a, **{n: v.clone() for n, v in tensors.items()}} for _ in range(count)]


def check(
    op: Op[..., Any], call: Callable[..., Any], a: dict[str, Any], like: dict[str, Any]
) -> None:
    """Raises CheckFailed where output, window or state differ from plain torch."""
    a["out"] = call(**a)
    for name in ("out", "conv", "recurrent"):
        ours, theirs = (x[name] if name == "out" else x[name][1:] for x in (a, like))
        compare(name, ours, theirs, op.contract.tolerance_of(name), torch.bfloat16)


def measure(op: Op[..., Any], heads: int, rows: int, rate: float) -> None:
    a = draw_cell(op, heads, rows)
    nbytes = op.contract.cost_of(a).bytes
    calls = min(max(COLD_BYTES // nbytes, 4), MOST_CALLS)
    like = copies(a, 1)[0]
    like["out"] = op.portable.run(**like)
    sets = copies(a, calls)
    graphs = {}
    for name, prepare in bench_of(op).peers.items():
        with suppress(ImportError):
            graphs[name] = in_graph([prepare(**one) for one in sets])
    peers = list(graphs)
    for tiles in TILES[op.name]:
        run = runner(op, tiles)
        try:
            check(op, run, copies(a, 1)[0], like)
            graphs[str(tuple(tiles))] = in_graph([partial(run, **one) for one in sets])
        except Exception as error:
            print(f"{heads}x{rows} {tiles}: {str(error)[-300:]}")
    times = interleave(graphs, rounds=9, device="cuda")
    medians = {name: timing.per(calls) for name, timing in times.items()}
    best = sorted(set(medians) - set(peers), key=lambda name: medians[name].median_us)[:SHOWN]
    shown = [name for name in (*peers, *best) if name in medians]
    text = ", ".join(f"{n} {medians[n].median_us:.2f} [{medians[n].spread:.0%}]" for n in shown)
    print(f"{op.name} {heads}x{rows}: floor {nbytes / rate * 1e6:.2f}; {text}", flush=True)


def main() -> None:
    op = catalog()[f"linear_attention/{sys.argv[1]}"]
    if sys.argv[2:] == ["compile"]:
        with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
            pool.map(compile_tiles, [(op.name, tiles) for tiles in TILES[op.name]], chunksize=1)
        return
    rate = copy_bandwidth(1 << 30, device="cuda")
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e9:.0f} GB/s; us per call, best first")
    for cell in sys.argv[2:] or CELLS:
        heads, rows = (int(size) for size in cell.split("x"))
        measure(op, heads, rows, rate)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
