"""Times linear_attention/kda_prefill on this GPU at its longest calls, beside what should be held.

A token-by-token reference takes minutes at these lengths, so that the kernel in fp32, which its
tests hold against the reference, is the measure: right first, then timed. Run from the repository's
root: python benchmarks/kda_prefill_long.py
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tercel.contract.compare import measure
from tercel.contract.timing import copy_bandwidth, in_graph, interleave
from tercel.ops._lib.kda_peers import chunk_kda, flash_kda
from tercel.ops.linear_attention.kda_prefill.kernel_triton import kda_prefill

EIGHT = tuple(range(0, 8193, 1024))
GOALS_US = {
    (6, (0, 8192)): 351,
    (6, (0, 65536)): 2569,
    (12, (0, 8192)): 509,
    (12, (0, 65536)): 3678,
    (96, (0, 8192)): 1412,
    (96, (0, 65536)): 11002,
    (96, EIGHT): 1216,
}
WIDTH = 128
CALLS = 2
RMS_ULPS = 2.0
"""Of bf16, as the contract allows it beside fp64."""


def draw(heads: int, bounds: tuple[int, ...]) -> dict[str, object]:
    make = torch.Generator("cuda").manual_seed(heads)
    shape, rows = (bounds[-1], heads), len(bounds) - 1
    normal = partial(torch.randn, device="cuda", generator=make)
    state = 0.3 * normal(rows + 1, heads, WIDTH, WIDTH)
    return {
        "qkv": normal(bounds[-1], 3 * heads * WIDTH, dtype=torch.bfloat16),
        "g": -torch.rand(*shape, WIDTH, device="cuda", generator=make),
        "b": normal(*shape, dtype=torch.bfloat16),
        "state": state,
        "slots": torch.arange(1, rows + 1, device="cuda"),
        "cu_seqlens": bounds,
        "fresh": (False,) * rows,
    }


def error(arguments: dict[str, object]) -> float:
    """RMS error of the first sequences' last head in ulps of bf16, beside the kernel in fp32."""
    state, qkv = arguments["state"], arguments["qkv"]
    heads = state.shape[1]
    parts = qkv.unflatten(-1, (3, heads, WIDTH))[:, :, -1].flatten(1)
    one = {
        **arguments,
        "qkv": parts.float().contiguous(),
        "g": arguments["g"][:, -1:].contiguous(),
        "b": arguments["b"][:, -1:].float().contiguous(),
        "state": state[:, -1:].clone(),
    }
    exact = kda_prefill(**one)
    o = kda_prefill(**{**arguments, "state": state.clone()})
    return measure(o[:, -1:], exact.double()).rms_ulps


def main() -> None:
    rate = copy_bandwidth(1 << 30, device="cuda")
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e9:.0f} GB/s; us per call")
    for (heads, bounds), goal in GOALS_US.items():
        arguments = draw(heads, bounds)
        wrong = error(arguments)
        if wrong > RMS_ULPS:
            print(f"wrong: {heads} heads, {bounds}: {wrong:.2f} ulps")
            continue
        calls = {"triton": partial(kda_prefill, **arguments)}
        for name, peer in {"fla": chunk_kda, "FlashKDA": flash_kda}.items():
            try:
                calls[name] = peer(**arguments)
            except ImportError as missing:
                print(f"{name} not run ({missing.name} is not installed)")
        graphs = {name: in_graph([call] * CALLS) for name, call in calls.items()}
        times = interleave(graphs, rounds=8, device="cuda")
        shown = ", ".join(f"{name} {t.per(CALLS).median_us:.0f}" for name, t in times.items())
        print(f"{heads} heads, {len(bounds) - 1} x {bounds[1]}: {shown}; goal {goal}", flush=True)


if __name__ == "__main__":
    main()
