"""The sanitizer watches what manages shared memory: each Gluon implementation at a cell that
launches a Gluon kernel."""

import json
import os
import subprocess
import sys

import pytest

from tests.interpreter import HAS_TRITON, REASON

LISTED = """
import json
import torch
import triton
from benchmarks.sanitizer import SHARED, ops, smallest
from tercel.contract.check import packed
from tools.compile import Shapes

kinds = []

def note(kernel, grid):
    return lambda *args, **options: kinds.append(type(kernel).__name__)

triton.runtime.jit.KernelInterface.__getitem__ = note
found = {}
for name, op in ops().items():
    for held in SHARED:
        if held in op.implementations:
            drawn = op.arguments(**op.contract.inputs(smallest(op, held), Shapes()))
            chosen = op.implementation(held)
            kinds.clear()
            chosen.run(**packed(op, chosen, drawn, torch.bfloat16))
            found[f"{name} {held}"] = list(kinds)
print(json.dumps(found))
"""


@pytest.mark.skipif(not HAS_TRITON, reason=REASON)
def test_every_gluon_implementation_launches_one():
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", LISTED]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found
    others = [name for name, kinds in found.items() if "GluonJITFunction" not in kinds]
    assert not others
