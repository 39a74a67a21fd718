"""Context rows of the published MLA drafter, which every rank writes whole."""

from tercel.contract import Cell
from tercel.contract.bench import Bench
from tercel.ops.spec.context_latent.reference import context_latent

SIZES = {"N": 7168, "LAYERS": 5, "L": 512, "E": 576, "PS": 64}

BENCH = Bench(
    cells=(
        Cell("a verify step of one request", ("tp16_moetp4ep4",), **SIZES, T=8, PAGES=3),
        Cell("a verify step of eight", ("tp16_moetp4ep4",), **SIZES, T=64, PAGES=9),
    ),
    baselines={"torch": context_latent},
)
