"""What holds for every test.

GPU tests run where there is a GPU; elsewhere they are skipped, counted and printed. Processes that
tests start can be interrupted even where the suite itself runs in the background of a shell, which
leaves SIGINT ignored for all its children.
"""

import signal

import pytest
import torch

REASON = "needs a CUDA device"


def pytest_configure():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_terminal_summary(terminalreporter):
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if REASON in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} GPU tests did not run here: no CUDA device. On a GPU machine: "
            "python -m pytest -m gpu"
        )
