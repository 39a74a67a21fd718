"""The public function."""

import torch

from tercel.contract import kernel, operation, ordered, portable, reference
from tercel.core.arch import Arch
from tercel.ops._lib.latent import whole_tiles
from tercel.ops.attention.mla_decode import ordered as by_head
from tercel.ops.attention.mla_decode import portable as gathered
from tercel.ops.attention.mla_decode import reference as naive
from tercel.ops.attention.mla_decode.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.mla_decode),
    portable(gathered.mla_decode),
    ordered(by_head.mla_decode),
    kernel("gluon_sm_90", naive.mla_decode, archs=frozenset({Arch.SM_90}), admits=whole_tiles),
    kernel("gluon", naive.mla_decode, admits=whole_tiles),
    kernel("triton", naive.mla_decode, admits=whole_tiles),
)
def mla_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    w_v: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    width: int,
    scale: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """MLA attention outputs, before the output projection, of width tokens per row.

    Args:
        query: [R * width, H, E] absorbed queries.
        pages: [PAGES, PS, E] in the dtype of query, or e4m3; the rows' own tokens included.
        block_table: [R, PG] int64 page ids; 0 past a row's end.
        context_lens: [R] int64 entries before this step; token i of row r sees
            context_lens[r] + i + 1. Entries before context_lens[r] are read before the wait for
            the previous launch, as the lengths and the table are.
        w_v: [H, V, L] in the dtype of query, any strides: the value rows of kv_b.
        gate: [R * width, H * V] in the dtype of query, after the sigmoid; None: no gate.
        width: tokens per row.
        scale: of the scores.
        page_scale: [1] fp32, with e4m3 pages: an entry is its codes times this.
    Returns:
        [R * width, H * V] in the dtype of query, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        a context that the block table does not hold; another page_scale than was appended with.
    Source: Kimi K3 modeling_kimi_linear.py, KimiMLAAttention.
    """
