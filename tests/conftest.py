"""What holds for every test.

GPU tests run where there is a GPU, and interpreted kernels where Triton is installed; elsewhere
they are skipped, counted and printed. Processes that tests start can be interrupted even where the
suite itself runs in the background of a shell, which leaves SIGINT ignored for all its children.
"""

import signal

import pytest
import torch

from tests import interpreter

interpreter.enable()
REASON = "needs CUDA devices: "


def pytest_configure():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    there = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = 0 if marker is None else marker.args[0] if marker.args else 1
        if needed > there:
            item.add_marker(pytest.mark.skip(reason=f"{REASON}{needed}"))


def pytest_terminal_summary(terminalreporter):
    reports = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    on_gpu = sum(REASON in report for report in reports)
    interpreted = sum(interpreter.REASON in report for report in reports)
    if on_gpu:
        terminalreporter.write_line(
            f"{on_gpu} GPU tests did not run here, with {torch.cuda.device_count()} CUDA devices. "
            "On a GPU machine: python -m pytest -m gpu"
        )
    if interpreted and not torch.cuda.is_available():
        terminalreporter.write_line(
            f"{interpreted} kernel tests did not run here: Triton is not installed"
        )
