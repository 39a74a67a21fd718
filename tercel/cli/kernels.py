"""What the commands about kernels share: which there are, what the GPU can do, how a time reads."""

from typing import Any

import torch

from tercel.contract import PLAIN, Cell, Op
from tercel.contract.bench import bench_of
from tercel.contract.goals import goal_us
from tercel.contract.jobs import Subject
from tercel.contract.receipt import Ceilings, CellTime, Status, status
from tercel.contract.timing import copy_bandwidth, matmul_rate, read_bandwidth
from tercel.core.arch import Arch, arch_of
from tercel.errors import ConfigError
from tercel.ops.catalog import catalog

COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192


def gpu_arch(command: str) -> Arch:
    """Of this machine's GPU; ConfigError where there is none that targets name."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"{command}: torch {torch.__version__} sees no GPU; run it where the kernels will run, "
            "with a CUDA build of torch"
        )
    arch = arch_of(torch.device("cuda"))
    if arch is None:
        raise ConfigError(f"{command}: no target names {torch.cuda.get_device_name()}")
    return arch


def ceilings() -> Ceilings:
    """What this GPU does at best."""
    return Ceilings(
        copy_bandwidth(COPY_BYTES, device="cuda"),
        read_bandwidth(COPY_BYTES, device="cuda"),
        matmul_rate(MATMUL_SIZE, device="cuda"),
    )


def named_ops(names: list[str] | None) -> list[Op[..., Any]]:
    """The ops of these names, with or without their category, or all."""
    known = {name for full, op in catalog().items() for name in (full, op.name)}
    unknown = set(names or ()) - known
    if unknown:
        raise ConfigError(f"no op {', '.join(sorted(unknown))}; `tercel ops` lists them")
    return [op for full, op in catalog().items() if not names or {full, op.name} & {*names}]


def kernels(ops: list[Op[..., Any]], arch: Arch, *, every: bool) -> list[Subject]:
    """Kernels of the ops: every one, or those whose receipt does not hold."""
    return [
        Subject.of(op, name)
        for op in ops
        for name, implementation in op.implementations.items()
        if name not in PLAIN
        and arch in implementation.archs
        and (every or status(op, name, arch) != Status.CERTIFIED)
    ]


def time_line(op: Op[..., Any], cell: Cell, time: CellTime, ceilings: Ceilings) -> str:
    """One timed cell: its time, goal and contenders."""
    others = {**time.baselines_us, **time.peers_us}
    goal = goal_us(bench_of(op).goal_of(cell), time, ceilings)
    parts = [
        f"  {cell}: {time.median_us:.2f} us ({time.low_us:.2f}..{time.high_us:.2f})",
        f"{time.bytes / time.median_us / 1e3:.0f} GB/s",
        *([] if goal is None else [f"goal {goal:.2f}, ratio {time.median_us / goal:.2f}"]),
        *(f"{name} {us:.2f}" for name, us in others.items()),
        *(f"{name} not run ({why})" for name, why in time.not_run.items()),
    ]
    return ", ".join(parts)
