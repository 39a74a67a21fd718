"""The kernels of tercel/ops/_lib/kernel_experts.py at up to 64 tokens; large plain matrices, which
take longest to read, are read once for all tokens of an expert, as moe/experts_grouped reads them.
"""

import torch

from tercel.ops._lib import kernel_experts, kernel_grouped_experts

LARGE = 1 << 19
"""Elements of an expert's w13 from which sorting the slots is worth its launches, where there is
more than one token. Chosen by measurement (benchmarks/experts_crossover.py), which also says that
MXFP4 is better read slot by slot."""


def experts_decode(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    w13_scale_2: torch.Tensor | None = None,
    w2_scale_2: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    ids_early: bool = False,
) -> torch.Tensor:
    given = (z, ids, weights, w13, w13_scale, w2, w2_scale, w13_scale_2, w2_scale_2)
    options = {"activation": activation, "beta": beta, "linear_beta": linear_beta}
    if w13_scale is None and len(z) > 1 and w13[0].numel() >= LARGE:
        run = kernel_grouped_experts.experts_of_act
        return run(*given, first_expert=first_expert, **options)
    run = kernel_experts.experts_of_act
    return run(*given, first_expert=first_expert, ids_early=ids_early, **options)
