"""Context rows of a drafter of Kimi K3, in a verify step and in a chunk of a prompt."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.spec.context_kv.portable import context_kv

LAYOUTS = ("tp16_moetp4ep4", "tp16_moetp16ep1")
SIZES = {"N": 7168, "L": 5, "KV": 1, "D": 64, "PS": 64}

BENCH = Bench(
    cells=(
        Cell("a verify step of one request", LAYOUTS, **SIZES, T=8, PAGES=3),
        Cell("a verify step of eight", LAYOUTS, **SIZES, T=64, PAGES=9),
        Cell("a chunk of a prompt", LAYOUTS, **SIZES, T=2048, PAGES=40),
        Cell("every head", (), **{**SIZES, "KV": 8, "D": 128}, T=8, PAGES=3),
    ),
    baselines={"torch": context_kv},
)
