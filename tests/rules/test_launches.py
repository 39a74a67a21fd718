"""Kernels let the next launch start when their implementations say that they do."""

import ast

import pytest

from tercel.contract import PLAIN
from tercel.ops.catalog import catalog
from tests.rules.launches import Launches
from tests.rules.sources import HOST

LAUNCHES = Launches({source.module: source.tree for source in HOST if source.package == "ops"})
KERNELS = [(op, name) for op in catalog().values() for name in op.implementations]
KERNELS = [(op, name) for op, name in KERNELS if name not in PLAIN]


@pytest.mark.parametrize(("op", "name"), KERNELS, ids=str)
def test_triggers_are_as_declared(op, name):
    implementation = op.implementation(name)
    found = LAUNCHES.early(f"{op.folder}.kernel_{name}", implementation.run.__name__)
    assert found, "the source does not tell what it launches"
    assert any(found.values()) == implementation.triggers_early, found


HOST_SIDE = """
from library import helper as taken, launch

def op(x):
    return launch(x, 4)
"""
LIBRARY = """
@triton.jit
def helper(x):
    cuda.gdc_launch_dependents()
    return tl.load(x)

@triton.jit
def kernel(x, y):
    {0}
    {1}
    {2}

@triton.jit
def ordinary(x, y):
    tl.store(y, tl.load(x))

KERNELS = {{"one": kernel}}

def launch(x, n):
    return (KERNELS["one"] if n > 2 else ordinary)[(n,)](x)
"""
WAIT, TRIGGER = "cuda.gdc_wait()", "cuda.gdc_launch_dependents()"


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ((WAIT, TRIGGER, "tl.store(y, tl.load(x))"), False),
        ((WAIT, "tl.store(y, tl.load(x))", "pass"), False),
        ((TRIGGER, WAIT, "tl.store(y, tl.load(x))"), True),
        (("held = helper(x)", WAIT, "tl.store(y, held)"), True),
        (("if x == 0: return", WAIT, TRIGGER), True),
        ((TRIGGER, "tl.store(y, tl.load(x))", "pass"), True),
    ],
    ids=["after", "never", "before", "in a helper", "a program ends", "waits for nothing"],
)
def test_an_early_trigger_is_found(lines, early):
    trees = {"host": ast.parse(HOST_SIDE), "library": ast.parse(LIBRARY.format(*lines))}
    found = Launches(trees).early("host", "op")
    assert found == {"library.kernel": early, "library.ordinary": False}
