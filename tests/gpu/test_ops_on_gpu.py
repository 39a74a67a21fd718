"""Every op's implementations on a GPU: cells, and CUDA graph replay in decode ops."""

import pytest
import torch

from tercel.blocks.sites import sites
from tercel.contract.check import check_cell, check_replay
from tercel.core.arch import Arch, arch_of
from tercel.core.step import StepClass
from tercel.ops.catalog import catalog

pytestmark = pytest.mark.gpu

PREFILL_SITES = {"kda_conv", "kda_prefill", "mla_prefill"}
DECODE = sorted(
    {op.name for site, op in sites(StepClass.DECODE).items() if site not in PREFILL_SITES}
)
OPS = {op.name: op for op in catalog().values()}
ARCH = arch_of(torch.device("cuda")) if torch.cuda.is_available() else Arch.SM_90


def implementations(op):
    """The fastest plain torch, and every kernel for this GPU."""
    kernels = [name for name in op.implementations if name not in ("reference", "portable")]
    return [op.portable.name, *(n for n in kernels if ARCH in op.implementations[n].archs)]


CALLS = [
    pytest.param(op, cell, name, id=f"{op.name}-{name}-{cell}")
    for op in OPS.values()
    for name in implementations(op)
    for cell in op.contract.cells
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("op", "cell", "name"), CALLS)
def test_cells(op, cell, name, dtype):
    check_cell(op, cell, name, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("op", "name"), [(OPS[op], name) for op in DECODE for name in implementations(OPS[op])]
)
def test_decode_ops_replay_in_a_graph(op, name):
    check_replay(op, op.contract.cells[0], name, dtype=torch.bfloat16, device="cuda")
