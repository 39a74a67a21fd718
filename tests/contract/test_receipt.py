"""A receipt holds as long as nothing it depends on changes, and comments are not a change."""

import ast
import sys
import time

import pytest

from tercel.contract import receipt as receipts
from tercel.contract.receipt import (
    CellResult,
    Receipt,
    Status,
    content_hash,
    import_closure,
    status,
)
from tercel.contract.timing import copy_bandwidth, interleave, matmul_rate, read_bandwidth
from tercel.core.arch import Arch
from tercel.ops.norm.rms_norm import rms_norm


def receipt(**changes) -> Receipt:
    fields = {
        "op": "rms_norm",
        "implementation": "reference",
        "arch": Arch.SM_90,
        "world_size": 1,
        "content_hash": content_hash(rms_norm, "reference"),
        "ran": True,
        "device": "NVIDIA H200",
        "versions": {"torch": "2.11.0"},
        "cells": (CellResult("T1-N7168"),),
    }
    return Receipt(**{**fields, **changes})


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([], Status.UNTESTED),
        ([receipt()], Status.CERTIFIED),
        ([receipt(ran=False)], Status.COMPILED),
        ([receipt(content_hash="0" * 64)], Status.STALE),
        ([receipt(arch=Arch.SM_100)], Status.UNTESTED),
        ([receipt(world_size=2)], Status.UNTESTED),
        ([receipt(content_hash="0" * 64), receipt()], Status.CERTIFIED),
    ],
)
def test_status(held, expected):
    assert status(rms_norm, "reference", Arch.SM_90, receipts=held) == expected


def test_closure_follows_imports_inside_the_package_only():
    closure = import_closure(["tercel.ops.norm.rms_norm.op"])
    assert {"tercel.contract.op", "tercel.errors", "tercel.ops.norm.rms_norm.reference"} <= closure
    assert all(name.startswith("tercel") for name in closure)
    assert "tercel.runtime.engine" not in closure


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two modules, one importing the other, that stands for ours."""
    folder = tmp_path / "falcon"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "wing.py").write_text("SPAN = 2\n")
    (folder / "bird.py").write_text("from falcon.wing import SPAN\n\ndef fly():\n    return SPAN\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(receipts, "PACKAGE", "falcon")
    yield folder
    for name in [name for name in sys.modules if name.startswith("falcon")]:
        del sys.modules[name]


def syntax_of(names):
    for cached in (receipts._tree, receipts._syntax, receipts._imports, receipts._is_module):
        cached.cache_clear()
    return {name: receipts._syntax(name) for name in sorted(import_closure(names))}


def test_a_comment_is_no_change_and_a_constant_is(package):
    before = syntax_of(["falcon.bird"])
    assert list(before) == ["falcon.bird", "falcon.wing"]
    (package / "wing.py").write_text('"""Wings."""\n# how wide\nSPAN = 2\n"""metres"""\n')
    assert syntax_of(["falcon.bird"]) == before
    (package / "wing.py").write_text("SPAN = 3\n")
    assert syntax_of(["falcon.bird"]) != before


def test_a_hash_does_not_depend_on_the_version_of_python():
    """ast.dump adds type_params=[] in 3.12 and leaves empty lists out in 3.13."""
    tree = ast.parse("def f(x=None):\n    return {**x, 'a': [f'{x!r}']}")
    tree.body[0].type_params = []
    assert receipts._text(tree) == (
        "Module(body=[FunctionDef(name='f', args=arguments(args=[arg(arg='x')], "
        "defaults=[Constant()]), body=[Return(value=Dict(keys=[None, Constant(value='a')], "
        "values=[Name(id='x', ctx=Load()), List(elts=[JoinedStr(values=[FormattedValue("
        "value=Name(id='x', ctx=Load()), conversion=114)])], ctx=Load())]))])])"
    )


def test_timer_ranks_work_and_reports_spread():
    times = interleave({"short": lambda: None, "long": lambda: time.sleep(0.02)}, rounds=5)
    assert times["short"].low_us < 20e3 <= times["long"].low_us
    assert times["long"].low_us <= times["long"].median_us <= times["long"].high_us


def test_ceilings_are_positive():
    assert copy_bandwidth(1 << 22, rounds=3) > 1e6
    assert read_bandwidth(1 << 22, rounds=3) > 1e6
    assert matmul_rate(64, rounds=3) > 1e5
