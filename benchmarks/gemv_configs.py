"""Times launch configurations of gemm/gemv on this GPU beside cuBLAS, to fill its table.

Right first: a configuration whose result is off is named and not timed. Run from the repository's
root: python benchmarks/gemv_configs.py
"""

import itertools
import multiprocessing
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton

from tercel.contract.check import draw
from tercel.contract.compare import measure
from tercel.contract.timing import copy_bandwidth, in_graph, interleave
from tercel.ops.gemm.gemv import CONTRACT, gemv
from tercel.ops.gemm.gemv.bench import BENCH, cublas
from tercel.ops.gemm.gemv.kernel_triton import Config, launch
from tercel.ops.gemm.gemv.reference import gemv as reference

CALLS = 16
PROCESSES = 12
SHOWN = 4


def configurations(depth: int) -> list[Config]:
    """Those that keep a thread's share of the weights in its registers."""
    width = triton.next_power_of_2(depth)
    slices = [
        Config(rows, warps)
        for rows, warps in itertools.product((1, 2, 4, 8, 16), (2, 4, 8))
        if 32 <= rows * width // (32 * warps) <= 160
    ]
    tiles = [
        Config(16, warps, 8, part)
        for warps, part in itertools.product((4, 8, 16), (64, 128, 256))
        if warps * part <= min(2048, max(512, width)) and (warps, part) != (4, 256)
    ]
    return slices + tiles


def compile_share(share: list[tuple[dict[str, int], Config]]) -> None:
    """First calls, whose machine code lands in Triton's cache on disk."""
    for sizes, config in share:
        x = torch.zeros(sizes["T"], sizes["K"], dtype=torch.bfloat16, device="cuda")
        weight = torch.zeros(sizes["M"], sizes["K"], dtype=torch.bfloat16, device="cuda")
        launch(x, weight, sizes["sigmoid_from"], config)


def compile_all() -> None:
    jobs = [
        (dict(cell.sizes), config)
        for cell in BENCH.cells
        for config in configurations(cell["K"])
        if cell["T"] in (1, 2)  # a lone token is its own build; other counts share one
    ]
    context = multiprocessing.get_context("spawn")
    with context.Pool(PROCESSES) as pool:
        pool.map(compile_share, [jobs[index::PROCESSES] for index in range(PROCESSES)])


def main() -> None:
    compile_all()
    rate = copy_bandwidth(1 << 30, device="cuda")
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e9:.0f} GB/s; us per call, best first")
    for cell in BENCH.cells:
        drawn = draw(gemv, cell, dtype=torch.bfloat16, device="cuda")
        gate = drawn["sigmoid_from"]
        sets = [(drawn["x"].clone(), drawn["weight"].clone()) for _ in range(CALLS)]
        expected = reference(drawn["x"].double(), drawn["weight"].double(), sigmoid_from=gate)
        graphs = {"cublas": in_graph([partial(cublas, *pair, sigmoid_from=gate) for pair in sets])}
        for config in configurations(cell["K"]):
            error = measure(launch(*sets[0], gate, config), expected)
            if error.element_ulps > CONTRACT.tolerance_of("y").allowed(torch.bfloat16)[0]:
                print(f"wrong: {cell} {config} {error}")
                continue
            graphs[str(tuple(config))] = in_graph([partial(launch, *p, gate, config) for p in sets])
        times = interleave(graphs, rounds=9, device="cuda")
        medians = {name: timing.per(CALLS).median_us for name, timing in times.items()}
        floor = gemv.contract.cost_of(drawn).bytes / rate * 1e6
        best = sorted((us, name) for name, us in medians.items() if name != "cublas")[:SHOWN]
        shown = ", ".join(f"{name} {us:.2f}" for us, name in best)
        print(f"{cell}: floor {floor:.2f}, cublas {medians['cublas']:.2f}; {shown}", flush=True)


if __name__ == "__main__":
    main()
