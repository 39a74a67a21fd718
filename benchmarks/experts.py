"""The routed experts of a decode step at Kimi K3's per-rank shapes, cold, inside CUDA graphs.

    python -m benchmarks.experts [--quick] [--only "8 tokens"]

Each call of a graph has its own ids, which rotate over one large set of experts: weights come from
memory as in serving, and ids are read on the device. Prints one line per case and configuration.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tercel.contract.timing import Timing, copy_bandwidth, in_graph, interleave
from tercel.core import mxfp4, mxfp8
from tercel.ops._lib.expert_tiles import Split
from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_experts import Config, Rows, Slots, down, few_tokens, gate_up

LATENT = 3584
ACTIVATION = Activation("situ", 4.0, 25.0)
BITS_PER_WEIGHT = 8 * (16 + 1) / mxfp4.BLOCK
"""Codes and scales, without what tiles are padded with."""
CONFIGS = {
    "one turn": Config(turns=1, registers=None),
    "two turns": Config(turns=2, registers=64),
    "one turn, 64 registers": Config(turns=1, registers=64),
    "two turns, free registers": Config(turns=2, registers=None),
}
OF_MXFP8 = {
    f"{name}, apart": CONFIGS[name]._replace(apart=True)
    for name in ("one turn", "two turns", "two turns, free registers")
}
"""What launches of their own do; W4A16 has neither."""


@dataclass(frozen=True)
class Case:
    """One rank of a layout at one number of tokens."""

    name: str
    experts: int
    width: int
    tokens: int
    local: int
    """Slots of each token that are on this rank, of 16."""
    distinct: int | None = None
    """Experts that the tokens share; None: as many as there are slots."""

    @property
    def pairs(self) -> int:
        return self.tokens * self.local

    def nbytes(self, rows_per_expert: int) -> float:
        experts = min(self.distinct or self.pairs, self.pairs)
        return experts * rows_per_expert * self.width * LATENT * BITS_PER_WEIGHT / 8


CASES = (
    Case("224 x 768, 1 token, 4 local", 224, 768, 1, 4),
    Case("224 x 768, 2 tokens", 224, 768, 2, 4),
    Case("224 x 768, 4 tokens", 224, 768, 4, 4),
    Case("224 x 768, 8 tokens, 32 pairs", 224, 768, 8, 4),
    Case("896 x 192, 1 token", 896, 192, 1, 16),
    Case("896 x 192, 2 tokens, disjoint", 896, 192, 2, 16),
    Case("896 x 192, 2 tokens, same", 896, 192, 2, 16, distinct=16),
    Case("896 x 192, 8 tokens", 896, 192, 8, 16),
    Case("448 x 384, 1 token, 8 local", 448, 384, 1, 8),
    Case("56 x 3072, 1 token, 1 local", 56, 3072, 1, 1),
)


def weights(case: Case, latent: int = LATENT) -> tuple[torch.Tensor, ...]:
    """Random packed weights: every pattern of bits is one."""
    made = []
    for rows, depth in ((2 * case.width, latent), (latent, case.width)):
        split = Split(depth)
        shape = (case.experts, rows // 16, split.parts)
        words = torch.randint(
            -(2**31), 2**31 - 1, (*shape, split.loads, 32, 4), dtype=torch.int32, device="cuda"
        )
        scales = torch.randint(
            114, 122, (*shape, split.octets, 128), dtype=torch.uint8, device="cuda"
        )
        made += [words, scales.view(torch.int32)]
    return tuple(made)


def routings(case: Case, calls: int) -> list[Slots]:
    """`calls` routings whose experts follow one another through the rank's, in random order."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(case.experts, generator=generator)
    made, at = [], 0
    for _ in range(calls):
        ids = torch.full((case.tokens, 16), case.experts, dtype=torch.int64)
        ids += torch.arange(16)
        for token in range(case.tokens):
            if case.distinct and token:
                chosen = ids[0][ids[0] < case.experts]
            else:
                chosen = order[torch.arange(at, at + case.local) % case.experts]
                at += case.local
            ids[token, torch.randperm(16, generator=generator)[: case.local]] = chosen
        shares = torch.rand(case.tokens, 16, generator=generator) / 8
        made.append(Slots(ids.cuda(), shares.cuda(), 0))
    return made


def measure(case: Case, quick: bool, rounds: int) -> dict[str, Timing]:
    """Microseconds per call of every configuration, with activations of both forms."""
    packed = weights(case)
    pairs = min(case.distinct or case.pairs, case.pairs)
    calls = min(max(case.experts // pairs, 12), 48)
    slots = routings(case, calls)
    z = [
        torch.randn(case.tokens, LATENT, device="cuda", dtype=torch.bfloat16) for _ in range(calls)
    ]
    plain = dict(list(CONFIGS.items())[: 2 if quick else None])
    forms = {
        "": ([Rows(x) for x in z], plain),
        "MXFP8, ": ([Rows(*mxfp8.quantize(x), "mxfp8") for x in z], plain | OF_MXFP8),
    }
    graphs: dict[str, Callable[[], object]] = {}

    def add(name: str, run: Callable[..., object], rows: list[Rows]) -> None:
        try:
            works = [partial(run, rows[i], slots[i]) for i in range(calls)]
            graphs[name] = in_graph(works)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)

    cuts = [
        (form, rows, *cut) for form, (rows, configs) in forms.items() for cut in configs.items()
    ]
    for form, rows, name, config in cuts:
        y = torch.empty(case.tokens, LATENT, device="cuda", dtype=torch.bfloat16)
        hidden = gate_up(rows[0], slots[0], packed[:2], ACTIVATION, config)
        for early in (False, True):
            head = f"{form}{name}, {'ids early' if early else 'waits'}"
            given = {"activation": ACTIVATION, "config": config, "ids_early": early}
            whole, first = (
                lambda x, s, o=given: few_tokens(x, s, packed, **o),
                lambda x, s, o=given: gate_up(x, s, packed[:2], **o),
            )
            add(f"{head}: whole", whole, rows)
            if not config.apart:
                add(f"{head}: FC1", first, rows)
        if config.apart:
            continue
        second = partial(_second, hidden, packed[2:], y, config)
        add(f"{form}{name}: FC2", second, rows)
    timings = interleave(graphs, rounds=rounds, device="cuda")
    return {name: timing.per(calls) for name, timing in timings.items()}


def _second(
    hidden: Rows,
    w2: tuple[torch.Tensor, ...],
    y: torch.Tensor,
    config: Config,
    _: Rows,
    slots: Slots,
) -> torch.Tensor:
    return down(hidden, slots, w2, y, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few configurations")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of cases")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON of every timing")
    options = parser.parse_args()
    copy = copy_bandwidth(1 << 30, device="cuda")
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e9:.0f} GB/s", flush=True)
    found = {}
    for case in CASES:
        if not any(part in case.name for part in options.only):
            continue
        timings = measure(case, options.quick, options.rounds)
        found[case.name] = {name: vars(timing) for name, timing in timings.items()}
        print(case.name)
        for name, timing in timings.items():
            rows = 3 if "whole" in name else 2 if "FC1" in name else 1
            nbytes = case.nbytes(rows)
            share = nbytes / (timing.median_us * 1e-6) / copy
            print(
                f"  {name:52} {timing.median_us:7.2f} us "
                f"({timing.low_us:.2f}..{timing.high_us:.2f})"
                f" {share:.2f} of copy, {nbytes / 1e6:.1f} MB",
                flush=True,
            )
        if options.out:
            options.out.write_text(json.dumps({"copy_bytes_per_s": copy, "cases": found}))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
