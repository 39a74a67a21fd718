"""Each Gluon implementation launches a Gluon kernel where it is certified and where the sanitizer
watches it: at a cell of its contract, and at the cell that the sanitizer takes."""

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

def launched(op, chosen, cell):
    kinds.clear()
    drawn = op.arguments(**op.contract.inputs(cell, Shapes()))
    chosen.run(**packed(op, chosen, drawn, torch.bfloat16))
    return "GluonJITFunction" in kinds

found = {}
for name, op in ops().items():
    for chosen in op.implementations.values():
        if chosen.name in SHARED:
            cells = [cell for cell in op.contract.cells if 0 not in cell.sizes.values()]
            found[f"{name} {chosen.name}"] = {
                "contract": any(launched(op, chosen, cell) for cell in cells),
                "sanitizer": launched(op, chosen, smallest(op, chosen.name)),
            }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", LISTED]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not HAS_TRITON, reason=REASON)
@pytest.mark.parametrize("place", ["contract", "sanitizer"])
def test_every_gluon_implementation_launches_one(found, place):
    assert found
    others = [name for name, launches in found.items() if not launches[place]]
    assert not others
