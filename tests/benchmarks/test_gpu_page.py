"""The page of GPU figures and its plots, from receipts and results that stand for measured ones."""

import json
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from benchmarks import gpu_page, svg
from tercel.contract import Cell
from tercel.contract.bench import Bench, Goal
from tercel.contract.receipt import (
    Ceilings,
    CellResult,
    CellTime,
    Receipt,
    ResultError,
    Status,
)
from tercel.core.arch import Arch
from tercel.ops.catalog import catalog

CELLS = (Cell("a small one", T=1, N=64), Cell("a large one", T=64, N=7168))
BENCH = Bench(CELLS, goals=(Goal(3.0, T=1), Goal("best peer", T=64)))


def receipt(op="rms_norm", implementation="triton", **large) -> Receipt:
    error = ResultError(0.5, 1.0, 0.1, 0.8)
    small = CellTime(2.5, 2.4, 2.6, 10**6, 10**6, baselines_us={"torch": 5.0})
    times = (small, CellTime(20.0, 19.0, 21.0, 8 * 10**7, 10**6, **large))
    return Receipt(
        op=op,
        implementation=implementation,
        arch=Arch.SM_90,
        world_size=1,
        content_hash="0" * 64,
        ran=True,
        device="NVIDIA H200",
        versions={"torch": "2.11"},
        cells=tuple(CellResult(str(c), {"y": error}, t) for c, t in zip(CELLS, times, strict=True)),
        ceilings=Ceilings(4e12, 4.1e12, 8e14),
        command="tercel certify --out bundle.json",
        date="2026-11-30",
    )


@pytest.fixture
def held(monkeypatch):
    """Makes the page see one op and its receipts, those of `stale` kernels without hold."""

    def hold(*found, name="norm/rms_norm", stale=()):
        gpu_page.timed.cache_clear()
        states = {True: Status.STALE, False: Status.CERTIFIED}
        monkeypatch.setattr(gpu_page, "receipts", lambda: [(name, replace(each)) for each in found])
        monkeypatch.setattr(gpu_page, "bench_of", lambda op: BENCH)
        monkeypatch.setattr(gpu_page, "status", lambda op, kernel, arch: states[kernel in stale])
        monkeypatch.setattr(gpu_page, "catalog", lambda: {name: catalog()[name]})

    yield hold
    gpu_page.timed.cache_clear()


def test_goals_are_met_missed_or_not_run(held, tmp_path):
    held(receipt(peers_us={"fla": 16.0}))
    page = gpu_page.render(tmp_path / "none.json")
    assert "1 of 2 are met" in page
    assert "| 3.00 | 2.50 | met (0.83) |" in page
    assert "| 16.00 | 20.00 | **missed** (1.25) |" in page
    assert "| 0.50 of 1 | 0.10 of 0.8 | 2 |" in page
    held(receipt(not_run={"fla": "fla is not installed"}))
    page = gpu_page.render(tmp_path / "none.json")
    assert "| best peer | 20.00 | not run |" in page
    assert "fla not run" in page


def test_a_named_goal_counts_once_whatever_kernels_there_are(held, tmp_path):
    """It is met or missed by the kernel that is bound: gemv's first is gluon, while it holds."""
    kernels = [receipt("gemv", "triton", peers_us={"fla": 16.0}), receipt("gemv", "gluon")]
    held(*kernels, name="gemm/gemv")
    page = gpu_page.render(tmp_path / "none.json")
    assert "1 of 2 are met; of all 2 timed cells 1" in page
    assert f"| gemv | gluon | {CELLS[0]} | 3.00 | 2.50 | met (0.83) |" in page
    assert f"| gemv | gluon | {CELLS[1]} | best peer | 20.00 | not run |" in page
    held(*kernels, name="gemm/gemv", stale=("gluon",))
    page = gpu_page.render(tmp_path / "none.json")
    assert f"| gemv | triton | {CELLS[1]} | 16.00 | 20.00 | **missed** (1.25) |" in page


def test_a_named_goal_that_nothing_was_timed_for_is_shown(held, tmp_path):
    held()
    page = gpu_page.render(tmp_path / "none.json")
    assert "0 of 2 are met" in page
    assert f"| rms_norm |  | {CELLS[0]} | 3.0 |  | not run |" in page


DECODED = {
    "tokens_per_s": 2000.0,
    "tokens_per_step": 1.0,
    "step_ms": 0.5,
    "graph_ms": 0.4,
    "floor_ms": 0.01,
}


def test_sections_of_other_programs(held, tmp_path):
    held(receipt())
    run = {"command": "python -m x", "date": "2026-11-30", "device": "H200", "versions": {}}
    step = {"step_ms": 3.0, "low_ms": 2.9, "high_ms": 3.1, "graph_ms": 2.5, "floor_ms": 1.5}
    step["kernels"] = [["ring", 109, 1283.1]]
    entries = {
        "kimi_linear_48b": {
            **run,
            "weight_bytes": 98 * 10**9,
            "loaded_s": 20.0,
            "steps": {"1": {**step, "bytes": 6 * 10**9, "portable_sites": []}},
        },
        "nano_on_gpu": {
            **run,
            "problems": 200,
            "gpu_right": 198,
            "cpu_right": 199,
            "paired_p": 1.0,
            "equal_texts": 0.99,
            "widest_fork_ulps": 1.5,
            "logprob_difference": 0.01,
            "forks": [{"problem": 3, "position": 7, "margin": 0.01, "ulps": 1.5}],
            "decode_calls": {"head:lm_head:triton": 3, "route:route:reference": 2},
            "portable_sites": ["route:route:reference"],
        },
        "speculation_on_gpu": {
            **run,
            "problems": 100,
            "graphs": {"plain": {"count": 16, "seconds": 1.5}},
            "rounds": {"acceptance_length": 7.1, "per_position": [0.95, 0.9]},
            "portable_sites": [],
            "batches": {
                "1": {
                    "plain": {**DECODED, "launches": 120},
                    "drafted": {**DECODED, "tokens_per_s": 9000.0, "launches": None},
                    "op_by_op_tokens_per_s": 500.0,
                    "speedup": 4.5,
                    "speedup_of_graphs": 4.25,
                    "speedup_at_floor": 5.0,
                    "equal_texts": 0.99,
                    "forks": [{"problem": 8, "position": 7, "margin": 0.02, "ulps": 2.5}],
                }
            },
        },
    }
    results = tmp_path / "h200.json"
    results.write_text(json.dumps(entries))
    page = gpu_page.render(results)
    assert "| 1 | ring | 109 | 1.283 |" in page
    assert "| 1 | 3.000 (2.900..3.100) | 2.500 | 1.500 | 6.00 | none |" in page
    assert "| 3 | 7 | 0.0100 | 1.50 |" in page
    assert "1 certified implementations and 1 portable ones: route:route:reference" in page
    assert "| 1, plain | 2000 | 1.00 | 0.500 | 0.400 | 0.0100 | 40 | 120 |" in page
    assert "| 1, drafted | 9000 | 1.00 | 0.500 | 0.400 | 0.0100 | 40 | not counted |" in page
    assert "Batch 1: 4.50 times" in page and "| 1 | 8 | 7 | 0.0200 | 2.50 |" in page


@pytest.mark.parametrize("plot", gpu_page.PLOT_BUILDERS)
def test_plots_are_svg_with_a_mark_per_cell(held, plot):
    held(receipt(peers_us={"fla": 16.0}))
    root = ElementTree.fromstring(gpu_page.PLOT_BUILDERS[plot]())
    marks = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(marks) == (1 if plot == "roof" else 2)


def test_axes():
    axis = svg.Axis(10, 1000, logarithmic=True)
    assert [axis.at(value) for value in (1, 10, 100, 1e6)] == [0, 0, pytest.approx(0.5), 1]
    assert axis.ticks() == pytest.approx([10, 100, 1000])
    assert svg.Axis(0, 110).ticks() == [0, 20, 40, 60, 80, 100]
