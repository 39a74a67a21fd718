"""As moe/experts_decode's; the goals are those of ids written two launches earlier."""

from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.ops.moe.experts_decode_mxfp8.contract import MAX_TOKENS

TP4_EP4, TP16 = ("tp16_moetp4ep4",), ("tp16_moetp16ep1",)
FOUR = {"k": 4, "E": 64, "L": 3584, "I": 768, "mxfp4": True}
ALL = {"k": 16, "E": 64, "L": 3584, "I": 192, "mxfp4": True}

BENCH = Bench(
    cells=(
        Cell("Kimi K3, four slots, early", TP4_EP4, T=1, early=True, **FOUR),
        Cell("Kimi K3, as many experts as slots", TP4_EP4, T=8, early=True, apart=True, **FOUR),
        *(Cell("Kimi K3, four slots a token", TP4_EP4, T=t, **FOUR) for t in (1, 8, MAX_TOKENS)),
        *(Cell("Kimi K3, all experts, narrow", TP16, T=t, **ALL) for t in (1, 2, 8)),
    ),
    goals=(Goal(9.0, T=1, k=4, I=768, early=True), Goal(41.5, T=8, k=4, I=768, early=True)),
)
