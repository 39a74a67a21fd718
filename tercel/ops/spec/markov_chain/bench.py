"""Drafts of nano, and of a rank's part of Kimi K3's vocabulary."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.spec.markov_chain.portable import markov_chain

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")

BENCH = Bench(
    cells=(
        Cell("nano, one request", ("tp1",), R=1, G=7, V=1280, D=64, greedy=False),
        *(
            Cell("greedy", LAYOUTS, R=requests, G=7, V=10240, D=256, greedy=True)
            for requests in (1, 8, 64)
        ),
        Cell("drawn", LAYOUTS, R=8, G=7, V=10240, D=256, greedy=False),
    ),
    baselines={"torch": markov_chain},
)
