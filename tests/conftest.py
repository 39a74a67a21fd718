"""GPU tests run where there is a GPU; elsewhere they are skipped, counted and printed. So are
interpreted kernels, where Triton is not installed."""

import pytest
import torch

from tests import interpreter

interpreter.enable()
REASON = "needs a CUDA device"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_terminal_summary(terminalreporter):
    reports = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    on_gpu = sum(REASON in report for report in reports)
    interpreted = sum(interpreter.REASON in report for report in reports)
    if on_gpu:
        terminalreporter.write_line(
            f"{on_gpu} GPU tests did not run here: no CUDA device. On a GPU machine: "
            "python -m pytest -m gpu"
        )
    if interpreted and not torch.cuda.is_available():
        terminalreporter.write_line(
            f"{interpreted} kernel tests did not run here: Triton is not installed"
        )
