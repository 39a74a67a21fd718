"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops._lib.kda import kernel_limits
from tercel.ops.linear_attention.kda_verify import portable as chunked
from tercel.ops.linear_attention.kda_verify import reference as naive
from tercel.ops.linear_attention.kda_verify.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.kda_verify),
    portable(chunked.kda_verify),
    kernel("triton", naive.kda_verify, admits=kernel_limits),
)
def kda_verify(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    o_norm: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    draft_k: torch.Tensor,
    draft_v: torch.Tensor,
    draft_g: torch.Tensor,
    draft_beta: torch.Tensor,
    slots: torch.Tensor,
    pending: torch.Tensor,
    *,
    width: int,
    lower_bound: float | None,
    eps: float,
) -> torch.Tensor:
    """A KDA layer between its projections over a certain token and width - 1 drafts per row.

    Args:
        qkv: [R * width, C] activations before the convolution, q | k | v, C = H * (2K + V); rows.
        gate: [R * width, H * V] activations before the sigmoid; rows contiguous.
        f: [R * width, H * K] activations of the forget projection; rows contiguous.
        b: [R * width, H] activations; beta is their sigmoid.
        conv_weight: [C, W] fp32, last tap: current token; channels fastest in memory is quickest.
        A_log: [H] fp32.
        dt_bias: [H * K] fp32.
        o_norm: [V] fp32, shared by the heads.
        conv: [SLOTS, W - 1 + D, C] in the dtype of qkv, raw rows, oldest first.
        recurrent: [SLOTS, H, V, K] fp32.
        draft_k: [SLOTS, D, H, K] fp32, or activations, which rounds keys once more.
        draft_v: [SLOTS, D, H, V] in the dtype of qkv.
        draft_g: [SLOTS, D, H, K] fp32.
        draft_beta: [SLOTS, D, H] fp32.
        slots: [R] int64; 0 marks padding. Kernels read them before the wait for the previous
            launch, which must not write them.
        pending: [R] int64, how many of the slot's drafts were accepted, 0 .. D.
        width: tokens per row, 1 .. 1 + D.
        lower_bound: of the log decay, -5.0 for K3; None for the Kimi-Linear form.
        eps: of the gated norm.
    Returns:
        [R * width, H * V] in the dtype of qkv, newly allocated.
    Raises:
        ContractError: a shape, dtype or width outside the contract.
    Wrong, silently:
        one live slot for two rows; a pending count above the previous step's drafts.
    Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.
    """
