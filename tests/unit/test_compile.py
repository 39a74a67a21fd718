"""The cross-compiler: what it reads off a kernel, without compiling the whole catalog."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.interpreter import HAS_TRITON, REASON
from tests.rules.sources import ROOT

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=REASON)

spec = importlib.util.spec_from_file_location("compile_tool", ROOT / "tools/compile.py")
tool = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool
spec.loader.exec_module(tool)

COMPILE = """
import json, sys
sys.path.insert(0, "tools")
import compile
from dataclasses import asdict
from tercel.contract import Cell
from tercel.contract.jobs import Subject
from tercel.core.arch import Arch
from tercel.ops.gemm.gemv import gemv

cells = (Cell("small", T=1, K=64, M=32),)
job = compile.CompileJob(Subject.of(gemv, "triton"), Arch(sys.argv[1]), cells)
print(json.dumps([asdict(build) for build in compile.compile_job(job)]))
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process that does not interpret kernels."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**kept, "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_launch_compiles():
    """What a build says; test_code_is_that_of_the_page compiles for every architecture."""
    arch = tool.Arch.SM_90
    result = run("-c", COMPILE, arch.value)
    assert result.returncode == 0, result.stderr
    (found,) = (tool.Build(**entry) for entry in json.loads(result.stdout))
    assert found.op == "gemv triton" and found.arch == arch.value
    assert 16 <= found.registers <= 255 and found.spilled == 0
    assert len(found.code) == 12


def test_page_is_read_as_it_is_written(tmp_path, monkeypatch):
    builds = [
        tool.Build("gemv triton", "_gemv", "K=64 num_warps=4", "sm_90", 40, 8, 16, 128, "ab" * 6),
        tool.Build("route triton", "_route", "", "sm_107", 40, 0, 0, 0, "cd" * 6),
    ]
    sources = {"gemv triton": "0" * 16, "route triton": "1" * 16}
    monkeypatch.setattr(tool, "PAGE", tmp_path / "compiled.md")
    assert tool.read_page() == ({}, [])
    tool.write_page(sources, builds)
    assert tool.read_page() == (sources, builds)
    assert tool._spilling(builds) == []
    spilling = dataclasses.replace(builds[0], spilled=24)
    assert tool._spilling([spilling]) == [f"spills too much: {spilling.line}"]


def test_only_what_changed_is_compiled(tmp_path, monkeypatch):
    first, second = list(tool.subjects())[:2]
    asked = []
    monkeypatch.setattr(tool, "PAGE", tmp_path / "compiled.md")
    monkeypatch.setattr(tool, "subjects", lambda: [first, second])
    monkeypatch.setattr(tool, "write_compiled_receipts", lambda chosen: None)
    monkeypatch.setattr(tool, "compiled", lambda jobs: asked.extend(jobs) or [])
    assert tool.update(every=False) == []
    assert {job.subject for job in asked} == {first, second}
    asked.clear()
    source = tool.source_of
    monkeypatch.setattr(tool, "source_of", lambda s: "f" * 16 if s == second else source(s))
    assert tool.check() == [f"{second}: its source or cells have changed"]
    tool.update(every=False)
    assert {job.subject for job in asked} == {second}
    assert tool.check() == []


def test_page_is_of_every_architecture():
    sources, builds = tool.read_page()
    assert {build.arch for build in builds} == {arch.value for arch in tool.TARGETS}
    assert tool._spilling(builds) == []
    assert sources == {str(each): tool.source_of(each) for each in tool.subjects()}


@pytest.mark.slow
def test_code_is_that_of_the_page():
    """One cell of each kernel, and every architecture is among them."""
    sample = tool.sample_of(tool.subjects())
    assert [str(job.subject) for job in sample] == [str(each) for each in tool.subjects()]
    assert {job.arch for job in sample} == set(tool.TARGETS)
    result = run("tools/compile.py", "--check")
    assert result.returncode == 0, result.stderr
