"""Routing and quantization of a decode step."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.moe.route_quantize.reference import route_quantize as torch_route_quantize

BENCH = Bench(
    cells=tuple(
        Cell("Kimi K3", ("tp16_moetp4ep4",), T=tokens, E=896, top_k=16, L=3584, scaling=2.827)
        for tokens in (1, 8, 64)
    ),
    baselines={"torch": torch_route_quantize},
)
