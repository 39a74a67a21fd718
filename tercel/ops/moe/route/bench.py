"""Routing of a decode step."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.moe.route.reference import route as torch_route

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")

BENCH = Bench(
    cells=(
        *(
            Cell("Kimi K3", LAYOUTS, T=tokens, E=896, top_k=16, scaling=2.827)
            for tokens in (1, 8, 64)
        ),
        Cell("Kimi-Linear, batch", ("tp1",), T=32, E=256, top_k=8, scaling=2.446),
    ),
    baselines={"torch": torch_route},
)
