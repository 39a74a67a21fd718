"""From how many slots per expert the experts of a decode step are better read once per expert.

    python -m benchmarks.experts_crossover [--only Linear] [--tokens 8 32]

A few tokens' slots are taken one by one (moe/experts_decode), which reads an expert again for each
of them; many tokens' slots are sorted and taken in blocks of one expert (moe/experts_grouped), in
five launches. Uniform routing, cold, inside CUDA graphs; microseconds of the whole.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import experts
from tercel.contract.timing import copy_bandwidth, in_graph, interleave
from tercel.ops._lib import kernel_slot_wgmma as gluon_form
from tercel.ops._lib.kernel_activation import Activation
from tercel.ops._lib.kernel_experts import Rows, Slots, few_tokens
from tercel.ops._lib.kernel_grouped_experts import PLAIN, Form, grouped
from tercel.ops._lib.kernel_slot_products import Config, Experts, Matrix, product, rows_in_act
from tercel.ops._lib.kernel_slot_streams import WARPGROUPS
from tercel.ops._lib.kernel_slot_wgmma import Block

CALLS = 8
TOKENS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Case:
    name: str
    local: int
    """Experts of this rank, of `total`."""
    total: int
    chosen: int
    latent: int
    width: int
    is_packed: bool


CASES = (
    Case("Kimi-Linear", 256, 256, 8, 2304, 1024, False),
    Case("K3, tp16_moetp4ep4", 224, 896, 16, 3584, 768, True),
    Case("K3, tp16_moetp16ep1", 896, 896, 16, 3584, 192, True),
    Case("nano", 16, 16, 4, 128, 128, True),
)


def cut(**options: int) -> Form:
    return Form(lambda slots: Config(**options), product, rows_in_act)


def forms(case: Case) -> dict[str, Form]:
    kinds = {
        "as grouped": PLAIN,
        "16 x 64": cut(slots=16, stages=4),
        "16 x 64, 6 stages": cut(slots=16, stages=6),
        "16 x 128, 8 warps": cut(slots=16, columns=128, warps=8, stages=4),
        "16 x 32": cut(slots=16, columns=32, stages=5),
    }
    if not case.is_packed:
        return kinds
    blocks = {
        "warpgroups": gluon_form.choose(1, e4m3=False),
        "of 16": Block((16,), 4),
        "of 16, 4 stages": Block((16,), 4, stages=4),
        "of 16, 8 warps": Block((16,), 8),
        "of 32, 8 warps": Block((32,), 8),
    }
    return {"as grouped": PLAIN} | {
        name: WARPGROUPS._replace(choose=lambda slots, block=block: block)
        for name, block in blocks.items()
    }


def weights(case: Case) -> tuple[torch.Tensor | None, ...]:
    if case.is_packed:
        sizes = experts.Case(case.name, case.local, case.width, 1, 1)
        return experts.weights(sizes, case.latent)
    shapes = (2 * case.width, case.latent), (case.latent, case.width)
    made = [
        torch.randn(case.local, *shape, device="cuda", dtype=torch.bfloat16) * shape[1] ** -0.5
        for shape in shapes
    ]
    return made[0], None, made[1], None


def measure(case: Case, tokens: int, held: tuple[torch.Tensor | None, ...], rounds: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    activation = Activation("situ", 4.0, 25.0) if case.is_packed else Activation("silu", None, None)
    inputs = []
    for _ in range(CALLS):
        ids = torch.stack(
            [torch.randperm(case.total, generator=generator)[: case.chosen] for _ in range(tokens)]
        )
        z = torch.randn(tokens, case.latent, device="cuda", dtype=torch.bfloat16)
        inputs.append((z, ids.cuda(), torch.rand(tokens, case.chosen, device="cuda") / 8))
    both = Experts(Matrix(held[0], held[1]), Matrix(held[2], held[3]), 0, activation)

    def by_token(z: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return few_tokens(Rows(z), Slots(ids, shares, 0), held, activation)

    def by_expert(z, ids, shares, form):
        return grouped(z, ids, shares, both, (form,))

    runs: dict[str, Callable[..., torch.Tensor]] = {"by token": by_token}
    runs |= {name: partial(by_expert, form=form) for name, form in forms(case).items()}
    graphs, expected = {}, by_token(*inputs[0]).float()
    for name, run in runs.items():
        try:
            error = float((run(*inputs[0]).float() - expected).norm() / expected.norm())
            assert error < 1e-2, error
            graphs[name] = in_graph([partial(run, *given) for given in inputs])
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    local = [ids[ids < case.local] for _, ids, _ in inputs]
    distinct = sum(len(ids.unique()) for ids in local) / CALLS
    slots = sum(map(len, local)) / CALLS
    row = [f"{slots:6.1f} slots of {distinct:5.1f} experts"]
    timings = interleave(graphs, rounds=rounds, device="cuda")
    row += [f"{name} {timing.per(CALLS).median_us:.1f}" for name, timing in timings.items()]
    print(f"{case.name}, {tokens:2} tokens: " + " | ".join(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    print(f"copy {copy_bandwidth(1 << 30, device='cuda') / 1e9:.0f} GB/s", flush=True)
    for case in CASES:
        if options.only in case.name:
            held = weights(case)
            for tokens in options.tokens:
                measure(case, tokens, held, options.rounds)
            del held
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
