"""Times launch configurations of the GEMV kernels on this GPU beside cuBLAS: what `choose` of
tercel/ops/_lib/kernel_gemv.py rests on.

Right first: a configuration whose result is off is named and not timed. Run from the repository's
root: python benchmarks/gemv_configs.py [--compile] [--out FILE]
"""

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tercel.contract.bench import COLD_BYTES
from tercel.contract.compare import measure
from tercel.contract.timing import copy_bandwidth, in_graph, interleave
from tercel.ops._lib.kernel_gemv import FEW_TOKENS, HELD_DEPTH, Config, choose, launch

PROCESSES = 14
SHOWN = 4
ULPS = 2.0
SHAPES = (
    (3208, 7168),
    (2880, 7168),
    (280, 7168),
    (896, 7168),
    (10240, 7168),
    (7168, 768),
    (7168, 640),
    (7168, 384),
    (7168, 2112),
    (1152, 1536),
)
RING_WARPS = ((2, 1), (4, 1), (8, 2), (8, 4))
SHARED_BYTES = 227 << 10
TOKENS = (1, 8, 16, 64)
"""Configurations are compared at these; the choice holds for what lies between."""


def configurations(tokens: int, columns: int, depth: int) -> Iterator[Config]:
    """What is worth trying of each kernel, the chosen one first."""
    yield choose(tokens, columns, depth, streams=True)
    if tokens == 1 and depth <= HELD_DEPTH:
        yield from (Config("held", rows, warps) for rows, warps in ((1, 2), (2, 4), (2, 8)))
    steps = -(-depth // 64)
    if tokens <= 2 * FEW_TOKENS:
        for rows, (warps, across), ahead in itertools.product(
            (16, 32, 64), RING_WARPS, (4, 6, 8, 10)
        ):
            step = 64 * warps // across
            held = min(ahead + 1, -(-depth // step)) * step * 2 * (rows + 8 * -(-tokens // 8))
            if held <= SHARED_BYTES and rows >= 16 * across:
                yield Config("ring", rows, warps, ahead, across=across)
        for split, warps, ahead in itertools.product((1, 2, 4, 7), (1, 2, 4, 8), (3, 4, 6, 7)):
            programs, each = -(-columns // 16) * split, -(-steps // split // warps)
            divides = split == 1 or (depth % (64 * split) == 0 and 60 < programs < 400)
            if divides and ahead <= each <= 28 and (each <= 7 or warps >= 4):
                yield Config("stream", 16, warps, ahead, min(ahead, 3), split)
    if tokens > 8:
        for rows, stages, split in itertools.product((32, 64), (3, 4), (1, 2, 4, 7, 14)):
            if depth % (split * 128) == 0 and 50 <= -(-columns // rows) * split < 450:
                yield Config("wide", rows, 4, stages, 0, split)


def compile_share(share: list[tuple[int, int, int, Config]]) -> None:
    """First calls, whose machine code lands in Triton's cache on disk."""
    for tokens, columns, depth, config in share:
        x = torch.zeros(tokens, depth, dtype=torch.bfloat16, device="cuda")
        weight = torch.zeros(columns, depth, dtype=torch.bfloat16, device="cuda")
        launch(x, weight, config)


def compile_all() -> None:
    jobs = {
        (depth, tokens > 8, config): (tokens, columns, depth, config)
        for tokens, (columns, depth) in itertools.product(TOKENS, SHAPES)
        for config in configurations(tokens, columns, depth)
    }
    work = list(jobs.values())
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(compile_share, [work[index::PROCESSES] for index in range(PROCESSES)])


def time_shape(tokens: int, columns: int, depth: int, rate: float) -> dict[str, object]:
    """Microseconds per configuration that is right; prints the best."""
    moved = 2 * (columns * depth + tokens * (depth + columns))
    calls = min(max(-(-COLD_BYTES // moved), 3), 64)
    weights = torch.randn(calls, columns, depth, dtype=torch.bfloat16, device="cuda")
    sets = [(torch.randn_like(weight[:tokens]), weight) for weight in weights]
    expected = sets[0][0].double() @ sets[0][1].double().T
    graphs: dict[str, Callable[[], object]] = {
        "cublas": in_graph([partial(torch.nn.functional.linear, *pair) for pair in sets])
    }
    chosen = str(tuple(choose(tokens, columns, depth, streams=True)))
    for config in dict.fromkeys(configurations(tokens, columns, depth)):
        error = measure(launch(*sets[0], config), expected)
        if error.element_ulps < ULPS:
            run = [partial(launch, *pair, config) for pair in sets]
            graphs[str(tuple(config))] = in_graph(run)
        else:
            print(f"wrong: {tokens} {columns} {depth} {tuple(config)} {error}", flush=True)
    times = interleave(graphs, rounds=7, device="cuda")
    medians = {name: round(timing.per(calls).median_us, 3) for name, timing in times.items()}
    best = sorted((us, name) for name, us in medians.items() if name != "cublas")
    shown = "; ".join(f"{name} {us:.2f}" for us, name in best[:SHOWN])
    floor = moved / rate * 1e6
    print(
        f"{tokens} x {columns} x {depth}: bytes {floor:.2f}, cublas {medians['cublas']:.2f}, "
        f"chosen {medians[chosen]:.2f} | {shown}",
        flush=True,
    )
    return {"tokens": tokens, "columns": columns, "depth": depth, "bytes": floor, "us": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--out", type=Path, help="all medians as JSON")
    options = parser.parse_args()
    if options.compile:
        compile_all()
        return
    rate = copy_bandwidth(1 << 30, device="cuda")
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e9:.0f} GB/s; us per call, best first")
    found = [time_shape(t, *shape, rate) for t, shape in itertools.product(TOKENS, SHAPES)]
    if options.out:
        options.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
