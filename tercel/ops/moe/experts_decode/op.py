"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.core.arch import Arch
from tercel.ops._lib import expert_tiles
from tercel.ops._lib.experts import pack
from tercel.ops.moe.experts_decode import portable as fast
from tercel.ops.moe.experts_decode import reference as naive
from tercel.ops.moe.experts_decode.contract import CONTRACT

OPTIONS = {
    "pack": expert_tiles.pack,
    "packed_bytes": expert_tiles.packed_bytes,
    "triggers_early": False,
}


@operation(
    CONTRACT,
    reference(naive.experts_decode),
    portable(fast.experts_decode, pack=pack),
    kernel("gluon", naive.experts_decode, archs=frozenset({Arch.SM_90}), **OPTIONS),
    kernel("triton", naive.experts_decode, **OPTIONS),
)
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
    """The weighted sum of this rank's chosen experts, for each of at most 64 tokens.

    Args:
        z: [T, L] act, T up to 64.
        ids: [T, k] i64 expert ids of the whole model, distinct within a row.
        weights: [T, k] fp32.
        w13: [E, 2 * I, L] act, gate rows then up rows; or [E, 2 * I, L / 2] u8 codes.
        w13_scale: MXFP4 [E, 2 * I, L / 32] u8; NVFP4 [E, 2 * I, L / 16] e4m3; else None.
        w2: [E, L, I] act; or [E, L, I / 2] u8.
        w2_scale: MXFP4 [E, L, I / 32] u8; NVFP4 [E, L, I / 16] e4m3; else None.
        w13_scale_2: NVFP4 [E, 2] f32, of the gate and of the up rows; else None.
        w2_scale_2: NVFP4 [E, 1] f32; else None.
        first_expert: id of w13[0]; slots outside first_expert .. first_expert + E - 1 add nothing.
        activation: situ or silu.
        beta, linear_beta: bounds of situ; silu does not read them.
        ids_early: a kernel may read ids, and the weights that they choose, before it waits for the
            previous launch: faster, and wrong unless ids are older; see the contract's hazards.
    Returns:
        [T, L] in the dtype of z, newly allocated: this rank's part, not yet reduced.
    Raises:
        ContractError: more tokens or more than 16 experts each, a shape or dtype outside the
            contract, codes without scales or the reverse, an unknown activation.
    Wrong, silently:
        an expert twice in a row of ids.
    Source: as moe/experts_grouped.
    """
