"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops.attention.mla_prefill import portable as windowed
from tercel.ops.attention.mla_prefill import reference as naive
from tercel.ops.attention.mla_prefill.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.mla_prefill),
    portable(windowed.mla_prefill),
    kernel("triton", naive.mla_prefill),
)
def mla_prefill(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    cu_seqlens: tuple[int, ...],
    context_lens: tuple[int, ...],
    scale: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """MLA attention outputs of sequences, before the output projection.

    Args:
        q: [T, H, K + E - L] queries, not absorbed: nope part, then rope part.
        pages: [PAGES, PS, E] in the dtype of q, or e4m3; the sequences' own tokens included.
        block_table: [N, PG] int64 page ids; 0 past a sequence's end.
        w_k: [H, K, L] in the dtype of q, any strides: the key rows of kv_b.
        w_v: [H, V, L] likewise: the value rows.
        gate: [T, H * V] in the dtype of q, after the sigmoid; None: no gate.
        cu_seqlens: N + 1 bounds into T.
        context_lens: N counts of entries before this step.
        scale: of the scores.
        page_scale: [1] fp32, with e4m3 pages: an entry is act(its codes times this).
    Returns:
        [T, H * V] in the dtype of q, newly allocated.
    Raises:
        ContractError: a shape, dtype or count outside the contract.
    Wrong, silently:
        a sequence that its block table does not hold; another page_scale than was appended with.
    Source: Kimi K3 modeling_kimi_linear.py, KimiMLAAttention.
    """
