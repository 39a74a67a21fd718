"""The cross-compiler: what it reads off a kernel, without compiling the whole catalog."""

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

LAUNCH = """
import json, sys
sys.path.insert(0, "tools")
import compile, torch
from dataclasses import astuple
from tercel.core.arch import Arch
from tercel.ops.gemm.gemv import gemv
from tercel.contract import Cell

arguments = gemv.arguments(**gemv.contract.inputs(Cell("small", T=1, K=64, M=32), compile.Shapes()))
launched = compile._launched(gemv.implementation("triton").run, arguments, Arch(sys.argv[1]))
print(json.dumps([(kernel, build, *compile._resources(c)) for kernel, build, c in launched]))
"""


@pytest.mark.parametrize("arch", list(tool.TARGETS), ids=str)
def test_one_launch_compiles(arch):
    environment = {**tool._environment(), "HOME": os.environ["HOME"]}
    result = subprocess.run(
        [sys.executable, "-c", LAUNCH, arch.value],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    [(kernel, build, registers, spilled, shared, code)] = json.loads(result.stdout)
    assert kernel == "_gemv_slice" and "K=64" in build
    assert 16 <= registers <= 255 and spilled == 0 and shared > 0
    assert len(code) == 12


def test_page_is_of_every_architecture():
    page = tool.PAGE.read_text(encoding="utf-8")
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert {line[3] for line in lines} == {arch.value for arch in tool.TARGETS}
    allowed = {(kernel, arch.value): size for (kernel, arch), size in tool.SPILL_BYTES.items()}
    assert all(int(line[5]) <= allowed.get((line[1], line[3]), 0) for line in lines)
