"""What holds for every test.

GPU tests run where there is a GPU, and interpreted kernels where Triton is installed; elsewhere
they are skipped, counted and printed. Without a GPU every process has one thread: the tensors here
are so small that more only wait for each other. Processes that tests start can be interrupted even
where the suite itself runs in the background of a shell, which leaves SIGINT ignored for all its
children.
"""

import gc
import os
import signal

import pytest
import torch

from tests import interpreter

interpreter.enable()
REASON = "needs CUDA devices: "


def pytest_configure():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Two suites at once would share a GPU and disturb what they time."""
    return 1 if torch.cuda.is_available() else min(8, os.cpu_count() or 1)


def pytest_collection_modifyitems(items):
    there = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = 0 if marker is None else marker.args[0] if marker.args else 1
        if needed > there:
            item.add_marker(pytest.mark.skip(reason=f"{REASON}{needed}"))


def pytest_collection_finish():
    """What is imported stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


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
