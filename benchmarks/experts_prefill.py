"""The routed experts of a prefill chunk at Kimi K3's shapes on a rank of tp16_moetp4ep4.

    python -m benchmarks.experts_prefill [--tokens 4096 512] [--sweep]

Uniform routing over 896 experts, of which 224 are here. Prints every launch, and with --sweep the
two products in other configurations. The best public kernel (humming 0.1.12, W4A16) takes 538 us
for gate_up and 315 us for down at 4096 tokens.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.experts import ACTIVATION, LATENT, Case, weights
from tercel.contract.timing import copy_bandwidth, in_graph, interleave
from tercel.ops.moe.experts_grouped import kernel_triton as kernel

EXPERTS, TOTAL, WIDTH, CHOSEN = 224, 896, 768, 16
CALLS = 3
SWEEP = (
    kernel.Config(32, 64, 4, 4),
    kernel.Config(32, 128, 4, 4),
    kernel.Config(64, 64, 4, 4),
    kernel.Config(64, 128, 4, 3),
    kernel.Config(128, 64, 4, 3),
    kernel.Config(128, 64, 4, 4),
    kernel.Config(128, 64, 8, 3),
    kernel.Config(128, 128, 4, 3),
    kernel.Config(128, 128, 8, 3),
    kernel.Config(256, 64, 4, 3),
    kernel.Config(256, 64, 8, 3),
)


def measure(tokens: int, sweep: bool) -> None:
    packed = weights(Case("prefill", EXPERTS, WIDTH, tokens, 4))
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(TOTAL, generator=generator)[:CHOSEN] for _ in range(tokens)])
    ids = ids.cuda()
    shares = torch.rand(tokens, CHOSEN, device="cuda") / 8
    z = torch.randn(tokens, LATENT, device="cuda", dtype=torch.bfloat16)
    lists, ordered = kernel.sort(ids, 0, EXPERTS), kernel.reordered(z)
    hidden = torch.zeros(tokens * CHOSEN, WIDTH, device="cuda", dtype=torch.bfloat16)
    outputs = torch.zeros(tokens * CHOSEN, LATENT, device="cuda", dtype=torch.bfloat16)
    chosen = kernel.choose(tokens * CHOSEN / EXPERTS)
    graphs: dict[str, Callable[[], object]] = {}

    def add(name: str, run: Callable[..., object], *arguments: object) -> None:
        try:
            graphs[name] = in_graph([partial(run, *arguments)] * CALLS)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)

    add("whole", kernel.launch, z, ids, shares, packed, 0, ACTIVATION, chosen)
    add("sort", kernel.sort, ids, 0, EXPERTS)
    add("reorder", kernel.reordered, z)
    add("combine", kernel.combine, outputs, ids, shares, 0, EXPERTS)
    for config in SWEEP if sweep else (chosen,):
        up = (ordered, lists, *packed[:2], ids.shape, 2 * WIDTH, config, ACTIVATION)
        add(f"FC1 {tuple(config)}", kernel.product, *up)
        back = (hidden, lists, *packed[2:], ids.shape, LATENT, config, None)
        add(f"FC2 {tuple(config)}", kernel.product, *back)
    rows = int(lists.counts.sum())
    print(f"{tokens} tokens, {rows} slots here, chosen {tuple(chosen)}")
    for name, timing in interleave(graphs, rounds=4, device="cuda").items():
        each = timing.per(CALLS)
        flops = 2 * rows * WIDTH * LATENT * {"FC1": 2, "FC2": 1, "who": 3}.get(name[:3], 0)
        print(f"  {name:28} {each.median_us:8.1f} us, {flops / each.median_us / 1e6:5.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="*", type=int, default=[4096, 512, 64])
    parser.add_argument("--sweep", action="store_true", help="other configurations too")
    options = parser.parse_args()
    copy = copy_bandwidth(1 << 30, device="cuda")
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e9:.0f} GB/s", flush=True)
    for tokens in options.tokens:
        measure(tokens, options.sweep)


if __name__ == "__main__":
    main()
