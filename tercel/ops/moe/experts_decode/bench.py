"""Routed experts of a decode step, fewer than a rank has; benchmarks/experts.py times a rank."""

from tercel.contract import Cell
from tercel.contract.certify import Bench
from tercel.ops.moe.experts_decode.contract import MAX_TOKENS

TP4_EP4, TP16 = ("tp16_moetp4ep4",), ("tp16_moetp16ep1",)
HERE = {"k": 16, "L": 3584, "mxfp4": True}
QUARTER = {**HERE, "E": 32, "I": 768, "total": 128, "first": 32}

BENCH = Bench(
    cells=(
        *(Cell("Kimi K3, a quarter of the experts", TP4_EP4, T=t, **QUARTER) for t in (1, 2, 8)),
        Cell("most tokens", TP4_EP4, T=MAX_TOKENS, **QUARTER),
        *(Cell("Kimi K3, all experts, narrow", TP16, T=t, E=32, I=192, **HERE) for t in (1, 2, 8)),
        Cell("half the experts of a width", T=2, E=16, I=384, total=32, **HERE),
        Cell("whole experts", T=2, E=4, I=3072, total=64, first=8, **HERE),
        Cell("capacity: every slot here", T=8, E=16, I=768, **HERE),
        Cell("no slot here", T=2, E=16, I=768, total=48, first=48, **HERE),
        Cell("Kimi-Linear", ("tp1",), T=1, k=8, E=16, L=2304, I=1024, activation="silu"),
        Cell("Kimi-Linear, batch", ("tp1",), T=8, k=8, E=16, L=2304, I=1024, activation="silu"),
    ),
)
