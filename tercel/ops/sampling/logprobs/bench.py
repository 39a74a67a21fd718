"""Log probabilities over Kimi K3's vocabulary."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.sampling.logprobs.reference import logprobs

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1", "tp8_pp2")

BENCH = Bench(
    cells=(
        *(Cell("the whole vocabulary", LAYOUTS, S=rows, V=163840, top=20) for rows in (1, 8, 64)),
        Cell("no alternatives", LAYOUTS, S=8, V=163840, top=0),
    ),
    baselines={"torch": logprobs},
)
