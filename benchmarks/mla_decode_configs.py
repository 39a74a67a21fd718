"""Times launch configurations of the MLA decode kernels on this GPU beside FlashMLA, where it is
installed: what `choose` and `choose_merge` of tercel/ops/attention/mla_decode rest on.

Right first: a configuration whose result is off is named and not timed. Run from the repository's
root: python benchmarks/mla_decode_configs.py [--out FILE]
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tercel.contract import Cell
from tercel.contract.bench import COLD_BYTES
from tercel.contract.compare import measure
from tercel.contract.draw import draw
from tercel.contract.timing import Work, copy_bandwidth, in_graph, interleave
from tercel.ops._lib.kernel_latent_merge import Config, Merge, Where, merge
from tercel.ops._lib.kernel_latent_parts import Context, attend
from tercel.ops.attention.mla_decode import mla_decode
from tercel.ops.attention.mla_decode.bench import BENCH, flash_mla
from tercel.ops.attention.mla_decode.kernel_gluon_sm_90 import attend_many
from tercel.ops.attention.mla_decode.kernel_triton import attend_parts

SHOWN = 6
MANY = 64, 64, 8, 2
"""The tiles of kernel_gluon_sm_90.py; others are kernel_triton.py's."""
FILLS = 16, 32, 66, 132, 264
"""Programs of a call to try."""
ULPS = 2.0
Arguments = dict[str, Any]


def tiles(queries: int, *, fp8: bool) -> Iterator[tuple[int, int, int, int]]:
    """(entries per tile, query rows per program, warps, stages) worth trying."""
    if queries <= 16:
        yield from ((32, 16, 4, 3), (32, 16, 4, 2), (64, 16, 8, 2), (64, 16, 4, 2), (16, 16, 4, 5))
    else:
        yield from ((32, 64, 8, 4), (32, 32, 4, 3))
        if not fp8:
            yield MANY


def merges(tokens: int, parts: int) -> Iterator[Merge]:
    if tokens > 1:
        yield from (Merge(False, 16, rows, 4) for rows in (16, 32, 64))
    elif parts <= 32:
        yield from (Merge(True, 1, rows, 4) for rows in (8, 16))
    else:
        yield from (Merge(False, 1, rows, warps) for rows, warps in ((16, 4), (8, 4), (8, 2)))


def configurations(cell: Cell) -> Iterator[tuple[Config, Merge]]:
    rows, width = len(cell["contexts"]), cell["width"]
    queries, length = cell["H"] * width, cell["contexts"][0] + width
    for tokens, columns, warps, stages in tiles(queries, fp8=cell.get("fp8", False)):
        blocks = rows * -(-queries // columns)
        most = -(-length // tokens)
        for parts in sorted({min(max(n // blocks, 1), most) for n in FILLS}):
            config = Config(tokens, columns, warps, stages, parts, 1)
            yield from ((config, each) for each in merges(rows * width, parts))


def call(a: Arguments, config: Config, merged: Merge) -> torch.Tensor:
    """One call of the op with these configurations."""
    context = Context(**{name: a[name] for name in Context._fields})
    kernel = attend_many if config[:4] == MANY else attend_parts
    parts = attend(kernel, context, a["w_v"].shape[2], config)
    where = Where(context.context_lens, context.width, context.capacity, config)
    return merge(*parts, where, a["w_v"], a["gate"], a["query"].dtype, merged)


def cold_sets(drawn: Arguments) -> list[Arguments]:
    """Copies of the arguments that together leave no cache warm."""
    nbytes = mla_decode.contract.cost_of(drawn).bytes
    count = min(max(-(-COLD_BYTES // nbytes), 4), 96)
    return [
        {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in drawn.items()}
        for _ in range(count)
    ]


def contenders(drawn: Arguments, cell: Cell, sets: list[Arguments]) -> dict[str, Work]:
    expected = mla_decode.using("portable")(**drawn).double()
    found: dict[str, Work] = {}
    for config, merged in configurations(cell):
        name = f"{tuple(config)} {tuple(merged)}"
        try:
            error = measure(call(drawn, config, merged), expected).rms_ulps
            if error > ULPS:
                print(f"  {name}: wrong by {error:.1f} ulps")
                continue
            found[name] = in_graph([partial(call, a, config, merged) for a in sets])
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:100]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write every median as JSON")
    parser.add_argument("--queries", type=int, default=1, help="of cells with so many query rows")
    options = parser.parse_args()
    print(f"copy {copy_bandwidth(device='cuda') / 1e9:.0f} GB/s")
    medians = {}
    for cell in BENCH.cells:
        if cell["H"] * cell["width"] < options.queries:
            continue
        drawn = draw(mla_decode, cell, dtype=torch.bfloat16, device="cuda")
        sets = cold_sets(drawn)
        works, peers = contenders(drawn, cell, sets), []
        if not cell.get("fp8"):
            try:
                peers = [flash_mla(**a) for a in sets]
                works["FlashMLA"] = in_graph(peers)
            except ImportError as error:
                print(f"  FlashMLA not run: {error.name} is not installed")
        timings = interleave(works, rounds=7, device="cuda")
        found = {n: round(t.median_us / len(sets), 2) for n, t in timings.items()}
        best = sorted(found, key=lambda name: found[name])[:SHOWN]
        print(f"{cell.why}: {cell}\n  " + "\n  ".join(f"{found[n]:8.2f} {n}" for n in best))
        print(f"  FlashMLA {found.get('FlashMLA', 'not run')}", flush=True)
        medians[str(cell)] = found
    if options.out:
        options.out.write_text(json.dumps(medians, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
