"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops._lib import expert_tiles
from tercel.ops.moe.experts_decode_mxfp8 import portable as fast
from tercel.ops.moe.experts_decode_mxfp8 import reference as naive
from tercel.ops.moe.experts_decode_mxfp8.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.experts_decode_mxfp8),
    portable(fast.experts_decode_mxfp8),
    kernel(
        "triton",
        naive.experts_decode_mxfp8,
        pack=expert_tiles.pack_mxfp4,
        packed_bytes=expert_tiles.packed_bytes,
        triggers_early=False,
    ),
)
def experts_decode_mxfp8(
    codes: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    first_expert: int,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    ids_early: bool = False,
) -> torch.Tensor:
    """The weighted sum of this rank's chosen experts for at most 64 tokens, activations in MXFP8.

    Args:
        codes: [T, L] e4m3, T up to 64, as moe/route_quantize writes them.
        scale: [T, L / 32] u8, 2 ** (scale - 127).
        ids: [T, k] i64 expert ids of the whole model, distinct within a row.
        weights: [T, k] fp32.
        w13: [E, 2 * I, L / 2] u8 MXFP4 codes, gate rows then up rows.
        w13_scale: [E, 2 * I, L / 32] u8.
        w2: [E, L, I / 2] u8 MXFP4 codes.
        w2_scale: [E, L, I / 32] u8.
        first_expert: id of w13[0]; slots outside first_expert .. first_expert + E - 1 add nothing.
        activation: situ or silu.
        beta, linear_beta: bounds of situ; silu does not read them.
        ids_early: as in moe/experts_decode.
    Returns:
        [T, L] bf16, newly allocated: this rank's part, not yet reduced. A row with codes that are
        not numbers is not a number.
    Raises:
        ContractError: more tokens or more than 16 experts each, a shape or dtype outside the
            contract, an unknown activation.
    Wrong, silently:
        an expert twice in a row of ids.
    Source: TensorRT-LLM's W4A8_MXFP4_MXFP8 experts; OCP Microscaling formats v1.0.
    """
