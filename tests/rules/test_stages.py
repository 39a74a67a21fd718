"""Every test belongs to one stage, and no stage selects zero tests."""

import subprocess
import sys

from tests.rules.sources import ROOT

STAGES = {
    "rules": "tests/rules",
    "unit": "tests/unit",
    "contract": "tests/contract",
    "parallel": "tests/parallel",
    "weights": "tests/weights",
    "reference": "tests/reference",
    "targets": "tests/targets",
    "runtime": "tests/runtime",
    "server": "tests/server",
    "end_to_end": "tests/end_to_end",
    "benchmarks": "tests/benchmarks",
    "gpu": "tests/gpu",
    "ops": "tercel/ops",
}
"""Stage to folder."""


def test_stages():
    listed = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "--no-header",
            "-p",
            "no:warnings",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    ids = [line for line in listed.splitlines() if "::" in line]
    counts = dict.fromkeys(STAGES, 0)
    for test in ids:
        stages = [stage for stage, folder in STAGES.items() if test.startswith(folder + "/")]
        assert len(stages) == 1, test
        counts[stages[0]] += 1
    assert all(counts.values()), counts
