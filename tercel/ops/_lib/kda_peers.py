"""What KDA's kernels are timed beside, where it is installed."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from tercel.contract.timing import Work
from tercel.ops._lib.fla_tuning import narrow_tuning

FLASH_KDA_BOUND = -5.0
FLASH_KDA_CHUNK = 16
FLASH_KDA_SYMBOL = (
    "_Z10launch_fwdILi128ELb1ELb1ELb1ELb1EEvPKN7cutlass10bfloat16_tES3_S3_S3_S3_PKvfPvPS1_S6_iiiiPKlPKf"
    "SB_fP11CUstream_st"
)
"""Initial and final states in fp32, sequences of any length."""
FLASH_KDA_TILE = 3 * 16 * 128 * 2 + 128 * 4 + 2 * 16 * 16 * 2
"""Bytes of workspace that a chunk of a head takes."""
LOG2_E = 1.4426950408889634


def fused_recurrent(
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
    """fla's recurrence alone, `width` tokens a row, the states in place one after the other
    whatever the slots; reads the bytes of qkv in another order."""
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


def chunk_kda(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: tuple[int, ...],
    **_: Any,
) -> Work:
    """fla's, on copies of the states; its final states stay outside the pool."""
    from fla.ops.kda import chunk_kda

    narrow_tuning()
    q, k, v = _heads(qkv, state)
    options = {
        "initial_state": torch.nan_to_num(state[slots]),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "state_v_first": True,
        "cu_seqlens": _bounds(cu_seqlens, qkv.device),
    }
    return torch.no_grad()(partial(chunk_kda, q, k, v, g[None], b[None], **options))


def flash_kda(
    qkv: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: tuple[int, ...],
    **_: Any,
) -> Work:
    """FlashKDA, gate included, on copies of the states; final states stay outside the pool.

    Its launcher is called by its symbol, since the binding of the published wheel takes no tensor
    of another torch than its own. As there, `b` is transposed and the workspace allocated in each
    call.
    """
    launch = _flash_kda_launcher()
    tokens, heads = g.shape[:2]
    rows, device = len(slots), qkv.device
    q, k, v = _heads(qkv, state)
    raw_gate = torch.logit(g / FLASH_KDA_BOUND, eps=1e-6).bfloat16()
    initial = torch.nan_to_num(state[slots])
    final, bounds = torch.empty_like(initial), _bounds(cu_seqlens, device)
    A_log, dt_bias = torch.zeros(heads, device=device), torch.zeros(g.shape[1:], device=device)
    tiles = -(-tokens // FLASH_KDA_CHUNK) + rows
    gate_scale = FLASH_KDA_BOUND * LOG2_E

    def run() -> torch.Tensor:
        out, beta = torch.empty_like(v), b.t().contiguous()
        work = torch.empty(heads * tiles * FLASH_KDA_TILE, dtype=torch.uint8, device=device)
        launch(
            *(x.data_ptr() for x in (q, k, v, raw_gate, beta, initial)),
            q.shape[-1] ** -0.5,
            *(x.data_ptr() for x in (final, out, work)),
            tiles,
            tokens,
            heads,
            rows,
            *(x.data_ptr() for x in (bounds, A_log, dt_bias)),
            gate_scale,
            torch.cuda.current_stream().cuda_stream,
        )
        return out

    return run


def _flash_kda_launcher() -> Callable[..., None]:
    package = find_spec("flash_kda_C")
    if package is None or package.origin is None:
        raise ImportError(name="flash_kda_C")
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    launch = getattr(ctypes.CDLL(package.origin), FLASH_KDA_SYMBOL)
    launch.restype = None
    launch.argtypes = [
        *[pointer] * 6,
        number,
        *[pointer] * 3,
        *[integer] * 4,
        *[pointer] * 3,
        number,
        pointer,
    ]
    return launch  # type: ignore[no-any-return]


def _heads(qkv: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v as [1, T, H, *] each."""
    _, heads, _, k_dim = state.shape
    ends = (heads * k_dim, 2 * heads * k_dim)
    parts = torch.tensor_split(qkv, ends, -1)
    return tuple(part.reshape(1, len(qkv), heads, -1).contiguous() for part in parts)


@cache
def _bounds(cu_seqlens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """One tensor for all calls: fla reads bounds that it does not know yet on the host, which a
    capture forbids."""
    return torch.tensor(cu_seqlens, device=device)
