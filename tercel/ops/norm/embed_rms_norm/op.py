"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.norm.embed_rms_norm import portable as fast
from tercel.ops.norm.embed_rms_norm import reference as naive
from tercel.ops.norm.embed_rms_norm.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.embed_rms_norm),
    portable(fast.embed_rms_norm),
    kernel("triton", naive.embed_rms_norm),
)
def embed_rms_norm(
    tokens: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    snapshot: torch.Tensor | None = None,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of the tokens and their RMSNorm.

    Args:
        tokens: [T] i64 ids of table rows.
        table: [V, N] act.
        weight: [N] in the dtype of the table.
        snapshot: [T, N] written with the embeddings where given: row 0 of the bank.
        eps: added to the mean square, inside the root.
    Returns:
        (normed [T, N], embedding [T, N]) in the dtype of the table, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        an id outside 0..V-1 on a device that does not check gathers.
    Source: Kimi K3 modeling_kimi_linear.py, embed_tokens, KimiRMSNorm.
    """
