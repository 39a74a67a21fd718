"""The public function."""

import torch

from tercel.contract import kernel, operation, reference
from tercel.core.arch import Arch
from tercel.ops._lib import expert_tiles
from tercel.ops.moe.experts_grouped_e4m3 import reference as naive
from tercel.ops.moe.experts_grouped_e4m3.contract import CONTRACT

OPTIONS = {
    "pack": expert_tiles.pack_for_e4m3,
    "packed_bytes": expert_tiles.packed_bytes_for_e4m3,
    "triggers_early": False,
}


@operation(
    CONTRACT,
    reference(naive.experts_grouped_e4m3),
    kernel("gluon", naive.experts_grouped_e4m3, archs=frozenset({Arch.SM_90}), **OPTIONS),
    kernel("triton", naive.experts_grouped_e4m3, **OPTIONS),
)
def experts_grouped_e4m3(
    z: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_largest: torch.Tensor | None = None,
    w2_largest: torch.Tensor | None = None,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """experts_grouped with activations in e4m3, one power of two a token and a slot. Lossy.

    Args:
        z: [T, L] act.
        ids: [T, k] i64 expert ids of the whole model, distinct within a row.
        weights: [T, k] fp32.
        w13: [E, 2 * I, L / 2] u8 codes of MXFP4, gate rows then up rows.
        w13_scale: [E, 2 * I, L / 32] u8.
        w2: [E, L, I / 2] u8.
        w2_scale: [E, L, I / 32] u8.
        w13_largest: None; in the packed form [E, 2 * I] u8, every row's largest scale.
        w2_largest: None; in the packed form [E, L] u8.
        first_expert: id of w13[0]; slots outside first_expert .. first_expert + E - 1 add nothing.
        activation: situ or silu.
        beta, linear_beta: bounds of situ; silu does not read them.
    Returns:
        [T, L] in the dtype of z, newly allocated: this rank's part, not yet reduced.
    Raises:
        ContractError: a shape or dtype outside the contract, an unknown activation.
    Wrong, silently:
        an expert twice in a row of ids.
    Source: as experts_grouped; one scale a token as in public W4A8 kernels.
    """
