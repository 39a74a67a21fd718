"""Every op's plain torch implementations on a GPU: cells, and CUDA graph replay in decode ops."""

import pytest
import torch

from tercel.blocks.sites import sites
from tercel.contract.check import check_cell, check_replay
from tercel.core.step import StepClass
from tercel.ops.catalog import catalog

pytestmark = pytest.mark.gpu

PREFILL_SITES = {"kda_conv", "kda_prefill", "mla_prefill"}
DECODE = sorted(
    {op.name for site, op in sites(StepClass.DECODE).items() if site not in PREFILL_SITES}
)
OPS = {op.name: op for op in catalog().values()}
CELLS = [
    pytest.param(op, cell, id=f"{op.name}-{cell}")
    for op in OPS.values()
    for cell in op.contract.cells
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("op", "cell"), CELLS)
def test_cells(op, cell, dtype):
    check_cell(op, cell, op.portable.name, dtype=dtype, device="cuda")


@pytest.mark.parametrize("name", DECODE)
def test_decode_ops_replay_in_a_graph(name):
    op = OPS[name]
    check_replay(op, op.contract.cells[0], op.portable.name, dtype=torch.bfloat16, device="cuda")
