"""fla's kernels tune themselves over dozens of configurations, which compile for minutes before the
first call. Here are the best of each on an H200 (fla 0.6.0, Triton 3.6), among which they choose.
"""

import sys
from typing import Any

BEST: dict[str, tuple[tuple[dict[str, int], int, int], ...]] = {
    "attnres_fwd_kernel": (
        ({"BL": 2}, 4, 2),
        ({"BL": 2}, 4, 3),
        ({"BL": 2}, 8, 2),
        ({"BL": 4}, 8, 2),
    ),
    "l2norm_fwd_kernel": (({"BT": 8}, 1, 3), ({"BT": 64}, 4, 3), ({"BT": 128}, 8, 3)),
    "chunk_local_cumsum_vector_kernel": (({"BS": 32}, 4, 3), ({"BS": 64}, 4, 3)),
    "chunk_kda_fwd_kernel_intra_sub_chunk": (({}, 1, 3), ({}, 2, 3)),
    "chunk_kda_fwd_kernel_inter_solve_fused": (({"BK": 32}, 1, 3), ({"BK": 64}, 1, 3)),
    "recompute_w_u_fwd_kda_kernel": (({}, 4, 2), ({}, 8, 3)),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (
        ({"BV": 32}, 4, 4),
        ({"BV": 32}, 4, 3),
        ({"BV": 64}, 4, 4),
    ),
    "chunk_gla_fwd_kernel_o": (({"BK": 64, "BV": 128}, 4, 3), ({"BK": 64, "BV": 128}, 8, 4)),
}
"""Kernel to (sizes, warps, stages), quickest first where it was measured."""


def narrow_tuning() -> None:
    """Leaves the kernels above, of the fla modules that are loaded, those configurations. Others
    choose among all of theirs."""
    from triton import Config

    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "fla"]
    for value in [value for module in modules for value in vars(module).values()]:
        tuner = _tuner(value)
        if tuner is not None and tuner.base_fn.__name__ in BEST:
            tuner.configs = [
                Config(sizes, num_warps=warps, num_stages=stages)
                for sizes, warps, stages in BEST[tuner.base_fn.__name__]
            ]


def _tuner(value: Any) -> Any:
    """The autotuner of a kernel, which may lie under heuristics; None where there is none."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    while isinstance(value, Heuristics):
        value = value.fn
    return value if isinstance(value, Autotuner) else None
