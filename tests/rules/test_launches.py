"""Calls let the next launch start when their implementations say that they do."""

import ast
from functools import cache

import pytest
import torch

from tercel.contract import PLAIN
from tercel.contract.check import packed
from tercel.contract.jobs import Subject
from tercel.ops.catalog import catalog
from tests.interpreter import HAS_TRITON
from tests.rules.launches import helpers, launches, triggers_early
from tests.rules.sources import HOST
from tools.compile import Shapes

TREES = {each.module: each.tree for each in HOST if each.package == "ops" and "jit" in each.text}
KERNELS = [(op, name) for op in catalog().values() for name in op.implementations]
KERNELS = [(op, name) for op, name in KERNELS if name not in PLAIN]


@cache
def around(module):
    return helpers(TREES, module)


def settles(fn, known):
    """Whether a kernel waits for the previous launch before it lets the next one start."""
    own = around(fn.__module__)
    return not triggers_early(own[fn.__name__], own, known)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize(("op", "name"), KERNELS, ids=str)
def test_triggers_are_as_declared(op, name, monkeypatch):
    """A call settles what older launches wrote if one of its launches does. A declared early
    trigger needs one cell that shows it; that there is none, all cells."""
    implementation = op.implementation(name)
    launched = early = False
    for cell in Subject.of(op, name).cells():
        drawn = op.arguments(**op.contract.inputs(cell, Shapes()))
        arguments = packed(op, implementation, drawn, torch.bfloat16)
        made = launches(implementation.run, arguments, monkeypatch)
        launched |= bool(made)
        early |= bool(made) and not any(settles(fn, known) for fn, known in made)
        if early:
            break
    assert launched and early == implementation.triggers_early


KERNEL = """
@triton.jit
def helper(x, LATE: tl.constexpr):
    if not LATE:
        cuda.gdc_launch_dependents()
    return tl.load(x)

@triton.jit
def kernel(x, y, LATE: tl.constexpr):
    {0}
    {1}
    {2}
"""
WAIT, TRIGGER = "cuda.gdc_wait()", "cuda.gdc_launch_dependents()"


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ((WAIT, TRIGGER, "tl.store(y, tl.load(x))"), False),
        ((WAIT, "tl.store(y, tl.load(x))", "pass"), False),
        ((TRIGGER, WAIT, "tl.store(y, tl.load(x))"), True),
        ((f"if LATE: {WAIT}", TRIGGER, WAIT), False),
        ((f"if not LATE: {WAIT}", TRIGGER, WAIT), True),
        (("held = helper(x, LATE)", WAIT, "tl.store(y, held)"), False),
        (("held = helper(x, False)", WAIT, "tl.store(y, held)"), True),
        (("if x == 0: return", WAIT, TRIGGER), True),
        ((TRIGGER, "tl.store(y, tl.load(x))", "pass"), True),
    ],
    ids=["after", "never", "before", "asked to wait", "not asked", "in a helper that is asked",
         "in a helper", "a program ends", "waits for nothing"],
)  # fmt: skip
def test_an_early_trigger_is_found(lines, early):
    own = helpers({"m": ast.parse(KERNEL.format(*lines))}, "m")
    assert triggers_early(own["kernel"], own, {"LATE": True}) == early
