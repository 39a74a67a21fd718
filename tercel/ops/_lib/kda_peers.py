"""What KDA's kernels are timed beside, where it is installed."""

from functools import partial
from typing import Any

import torch

from tercel.contract.timing import Work


def fla(
    qkv: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    recurrent: torch.Tensor,
    slots: torch.Tensor,
    lower_bound: float | None,
    width: int = 1,
    **others: Any,
) -> Work:
    """The recurrence alone, `width` tokens a row, the states in place one after the other whatever
    the slots; reads the bytes of qkv in another order."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    _, heads, v_dim, k_dim = recurrent.shape
    rows, keys = slots.shape[0], (slots.shape[0], width, heads, k_dim)
    count = rows * width * heads * k_dim
    flat = qkv.flatten()
    v = flat[2 * count :].view(rows, width, heads, v_dim)
    return partial(
        fused_recurrent_kda_fwd,
        flat[:count].view(keys),
        flat[count : 2 * count].view(keys),
        v,
        f.view(keys),
        b.view(rows, width, heads),
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=recurrent[1 : rows + 1],
        inplace_final_state=True,
        state_v_first=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=lower_bound,
        out=torch.empty_like(v),
    )
