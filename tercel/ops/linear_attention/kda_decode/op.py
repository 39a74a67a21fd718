"""The public function."""

import torch

from tercel.contract import kernel, operation, portable, reference
from tercel.ops._lib.kda import kernel_limits
from tercel.ops.linear_attention.kda_decode import portable as fused
from tercel.ops.linear_attention.kda_decode import reference as naive
from tercel.ops.linear_attention.kda_decode.contract import CONTRACT


@operation(
    CONTRACT,
    reference(naive.kda_decode),
    portable(fused.kda_decode),
    kernel("triton", naive.kda_decode, admits=kernel_limits),
)
def kda_decode(
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
    slots: torch.Tensor,
    *,
    lower_bound: float | None,
    eps: float,
) -> torch.Tensor:
    """A KDA layer between its projections, one token per row; each row's slot is moved on.

    Args:
        qkv: [R, C] activations before the convolution, q | k | v, C = H * (2K + V); rows.
        gate: [R, H * V] activations before the sigmoid; rows contiguous.
        f: [R, H * K] activations of the forget projection; rows contiguous.
        b: [R, H] activations; beta is their sigmoid.
        conv_weight: [C, W] fp32, last tap: current token; channels fastest in memory is quickest.
        A_log: [H] fp32.
        dt_bias: [H * K] fp32.
        o_norm: [V] fp32, shared by the heads.
        conv: [SLOTS, S, C] in the dtype of qkv, S >= W - 1, raw rows, oldest first.
        recurrent: [SLOTS, H, V, K] fp32.
        slots: [R] int64; 0 marks padding. Kernels read them before the wait for the previous
            launch, which must not write them.
        lower_bound: of the log decay, -5.0 for K3; None for the Kimi-Linear form.
        eps: of the gated norm.
    Returns:
        [R, H * V] in the dtype of qkv, newly allocated.
    Raises:
        ContractError: a shape or dtype outside the contract.
    Wrong, silently:
        one live slot for two rows; a slot whose drafts are pending.
    Source: Kimi K3 modeling_kimi_linear.py, KimiDeltaAttention.
    """
