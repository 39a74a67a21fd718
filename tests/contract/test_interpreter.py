"""Triton's interpreter, and what tests.interpreter mends in it."""

import subprocess
import sys

import pytest

from tests.interpreter import INTERPRETED, REASON
from tests.rules.sources import ROOT

pytestmark = pytest.mark.skipif(not INTERPRETED, reason=REASON)

PROBE = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton
import triton.language as tl
from tests.interpreter import enable

@triton.jit
def product(a, b, c):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = i * 16 + j
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))

@triton.jit
def rounded(a, c):
    i = tl.arange(0, 256)
    tl.store(c + i, tl.load(a + i).to(tl.bfloat16))

@triton.jit
def added(a, c):
    i, j = tl.arange(0, 16384)[:, None], tl.arange(0, 2)[None, :]
    tl.store(c + tl.arange(0, 2), tl.sum(tl.load(a + i * 2 + j), 0))

torch.manual_seed(0)
a, b = torch.randn(2, 16, 16).bfloat16()
c = torch.empty(16, 16)
x, y = torch.randn(256), torch.empty(256).bfloat16()
terms, total = torch.rand(16384, 2), torch.empty(2)
for prepare in (int, enable):
    prepare()
    product[(1,)](a, b, c)
    rounded[(1,)](x, y)
    added[(1,)](terms, total)
    is_close = torch.allclose(total.double(), terms.double().sum(0), rtol=2**-23, atol=0)
    right = torch.allclose(c, a.float() @ b.float(), atol=1e-4), torch.equal(y, x.bfloat16())
    print(*right, is_close)
"""


def test_bf16_dot_rounding_and_sums(tmp_path):
    """The first line is the canary: when it is right as installed, the mending can go."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    result = subprocess.run(
        [sys.executable, script], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert result.stdout.split("\n")[:2] == ["False False False", "True True True"]
