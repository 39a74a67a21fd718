"""Narrowing fla's tuning, on modules that stand for fla's."""

import sys
from types import ModuleType

import pytest

from tercel.ops._lib.fla_tuning import BEST, narrow_tuning

triton = pytest.importorskip("triton")


def _tuned(name, module):
    """A kernel of this name that tunes itself over three configurations, put into a module."""

    def function(x):
        pass

    function.__name__ = name
    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2, 4)]
    kernel = triton.autotune(configs, key=[])(triton.jit(function))
    setattr(module, name, kernel)
    return kernel


def test_known_kernels_of_fla_choose_among_the_best_ones(monkeypatch):
    theirs, others = ModuleType("fla.made_up"), ModuleType("flat.made_up")
    for module in (theirs, others):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    known, unknown = _tuned("chunk_gla_fwd_kernel_o", theirs), _tuned("unheard_of", theirs)
    foreign = _tuned("chunk_gla_fwd_kernel_o_2", others)
    foreign.base_fn.__name__ = known.base_fn.__name__
    narrow_tuning()
    found = [(each.kwargs, each.num_warps, each.num_stages) for each in known.configs]
    assert found == list(BEST["chunk_gla_fwd_kernel_o"])
    assert len(unknown.configs) == len(foreign.configs) == 3


def test_a_kernel_under_heuristics_is_found(monkeypatch):
    module = ModuleType("fla.made_up")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernel = _tuned("l2norm_fwd_kernel", module)
    module.l2norm_fwd_kernel = triton.heuristics({"EVEN": lambda _: True})(kernel)
    narrow_tuning()
    assert len(kernel.configs) == len(BEST["l2norm_fwd_kernel"])
