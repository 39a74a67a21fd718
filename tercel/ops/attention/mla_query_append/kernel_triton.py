"""attention/mla_query_append in two launches, or one where queries have no latent.

What absorbs a head needs all of its rows of the projection, so one launch would either read q_b
many times over or wait inside for other programs: the second launch has its weights in registers
by the time the first is done. ops/_lib/kernel_latent.py.
"""

import torch

from tercel.ops._lib.kernel_latent import Store, absorb, project


def mla_query_append(
    q: torch.Tensor,
    q_norm: torch.Tensor | None,
    q_b: torch.Tensor | None,
    latent: torch.Tensor,
    kv_norm: torch.Tensor,
    w_k: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_eps: float,
    eps: float,
    page_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    if q_norm is not None and q_b is not None:
        q = project(q, q_norm, q_b, q_eps)
    return absorb(q, w_k, Store(latent, kv_norm, eps, pages, slot_mapping, page_scale))
