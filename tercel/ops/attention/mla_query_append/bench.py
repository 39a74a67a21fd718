"""Queries and entries of Kimi K3 in a decode step."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.attention.mla_query_append.contract import HEAD, LAYOUTS
from tercel.ops.attention.mla_query_append.portable import mla_query_append

POOL = {"PAGES": 9, "PS": 64}

BENCH = Bench(
    cells=(
        *(
            Cell("a decode step", LAYOUTS, **HEAD, **POOL, T=tokens, Q=1536, H=6)
            for tokens in (1, 8, 64)
        ),
        Cell("a rank of eight", ("tp8_pp2",), **HEAD, **POOL, T=1, Q=1536, H=12),
        Cell("every head", (), **HEAD, **POOL, T=8, Q=1536, H=96),
        Cell("FP8 cache", LAYOUTS, **HEAD, **POOL, T=8, Q=1536, H=6, fp8=True),
    ),
    baselines={"torch": mla_query_append},
)
