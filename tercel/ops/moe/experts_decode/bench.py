"""Routed experts of a decode step with every slot on this rank, at fewer experts than a rank has:
four slots a token are what a rank of tp16_moetp4ep4 has on average. benchmarks/experts.py times
whole ranks whose other slots are elsewhere. The goals are those of ids written two launches
earlier."""

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.ops._lib.experts_peers import humming
from tercel.ops.moe.experts_decode.contract import MAX_TOKENS

TP4_EP4, TP16 = ("tp16_moetp4ep4",), ("tp16_moetp16ep1",)
FOUR = {"k": 4, "E": 64, "L": 3584, "I": 768, "mxfp4": True}
ALL = {"k": 16, "E": 64, "L": 3584, "I": 192, "mxfp4": True}

BENCH = Bench(
    cells=(
        Cell("Kimi K3, four slots a token, early", TP4_EP4, T=1, early=True, **FOUR),
        Cell("Kimi K3, four slots a token", TP4_EP4, T=1, **FOUR),
        Cell("Kimi K3, as many experts as slots", TP4_EP4, T=8, apart=True, **FOUR),
        Cell("Kimi K3, four slots a token", TP4_EP4, T=MAX_TOKENS, **FOUR),
        *(Cell("Kimi K3, all experts, narrow", TP16, T=t, **ALL) for t in (1, 8)),
        Cell("half of the width", T=1, k=8, E=16, L=3584, I=384, mxfp4=True),
        Cell("whole experts", T=2, k=2, E=4, L=3584, I=3072, mxfp4=True),
        Cell("no slot here", T=2, k=16, E=4, L=3584, I=768, total=48, first=48, mxfp4=True),
        Cell("Kimi-Linear", ("tp1",), T=1, k=8, E=16, L=2304, I=1024, activation="silu"),
        *(
            Cell("Kimi-Linear, batch", ("tp1",), T=t, k=8, E=16, L=2304, I=1024, activation="silu")
            for t in (8, 32)
        ),
    ),
    peers={"humming, products alone": humming},
    goals=(Goal(8.5, T=1, k=4, I=768, early=True), Goal(40.5, T=8, k=4, I=768)),
)
