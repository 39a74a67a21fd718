"""Every test belongs to one stage, and no stage selects zero tests."""

import re

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
    counts = dict.fromkeys(STAGES, 0)
    for folder in ("tercel", "tests", "benchmarks", "tools", "training"):
        for file in (ROOT / folder).rglob("test_*.py"):
            path = file.relative_to(ROOT).as_posix()
            stages = [stage for stage, folder in STAGES.items() if path.startswith(folder + "/")]
            assert len(stages) == 1, path
            counts[stages[0]] += len(re.findall(r"^ *def test_", file.read_text(), re.MULTILINE))
    assert all(counts.values()), counts
