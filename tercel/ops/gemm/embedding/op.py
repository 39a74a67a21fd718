"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.gemm.embedding import portable as fast
from tercel.ops.gemm.embedding import reference as naive
from tercel.ops.gemm.embedding.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.embedding),
    portable(fast.embedding),
    kernel("triton", naive.embedding),
)
def embedding(tokens: torch.Tensor, table: torch.Tensor, *, first_id: int) -> torch.Tensor:
    """Rows of the table for the tokens that it holds, zeros for all others.

    Args:
        tokens: [T] i64 ids of the whole vocabulary.
        table: [V, N] act, this rank's consecutive rows.
        first_id: id of table[0], at least 0.
    Returns:
        [T, N] in the dtype of the table, newly allocated: this rank's part, not yet reduced.
    Raises:
        ContractError: a shape or dtype outside the contract, or a negative first_id.
    Wrong, silently:
        an id outside the vocabulary gives a row of zeros on every rank.
    Source: Kimi K3 modeling_kimi_linear.py, embed_tokens; Megatron-LM, VocabParallelEmbedding.
    """
