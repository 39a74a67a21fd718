"""One protocol, three backends, the same bits."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tercel.core.group import Group
from tercel.core.sums import rank_ordered_sum
from tercel.errors import EngineError
from tercel.parallel import SingleGroup, run_threads
from tercel.parallel.distributed import DistributedGroup


def part(rank: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(48, 6, generator=generator).to(dtype)


def exercise(group: Group, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Every call of the protocol once; exchanges whose result differs per rank are gathered."""
    x = part(group.rank).to(device)
    chunks = [x[:1] * (1 + peer) for peer in range(group.world_size)]
    swapped = torch.cat(group.all_to_all(chunks))
    return {
        "all_reduce": group.all_reduce(x),
        "all_gather": group.all_gather(x, dim=1),
        "reduce_scatter": group.all_gather(group.reduce_scatter(x)),
        "all_to_all": group.all_gather(swapped),
        "fp8": group.all_gather(x.to(torch.float8_e4m3fn)).view(torch.uint8),
        "vote": torch.tensor([group.vote(True), group.vote(group.rank == 0)]),
    }


def expected(world_size: int) -> dict[str, torch.Tensor]:
    parts = [part(rank) for rank in range(world_size)]
    total = rank_ordered_sum(parts)
    swaps = [p[:1] * (1 + rank) for rank in range(world_size) for p in parts]
    return {
        "all_reduce": total,
        "all_gather": torch.cat(parts, dim=1),
        "reduce_scatter": total,
        "all_to_all": torch.cat(swaps),
        "fp8": torch.cat([p.to(torch.float8_e4m3fn) for p in parts]).view(torch.uint8),
        "vote": torch.tensor([True, world_size == 1]),
    }


def assert_same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.equal(actual[name].cpu(), value), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_threads(world_size):
    for result in run_threads(world_size, exercise):
        assert_same(result, expected(world_size))


def test_single():
    assert_same(exercise(SingleGroup()), expected(1))


def run_process(rank: int, world_size: int, address: str, backend: str) -> None:
    """One rank of a group of processes, in a process of its own."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
    group = DistributedGroup()
    for device in ("cpu", "cuda") if backend == "nccl" else ("cpu",):
        assert_same(exercise(group, device), expected(world_size))
        assert_same(exercise(group.split(1), device), expected(1))
        pair = DistributedGroup(dist.new_group(list(range(world_size))))
        x = part(7).to(device)
        if rank == 0 and world_size > 1:
            pair.send(x, 1)
        elif rank == 1:
            assert torch.equal(pair.recv(torch.empty_like(x), 0), x)
    dist.destroy_process_group()


def run_processes(world_size: int, backend: str, directory: Path) -> None:
    address = f"file://{directory}/store"
    mp.spawn(run_process, args=(world_size, address, backend), nprocs=world_size)


@pytest.mark.slow
def test_gloo(tmp_path):
    run_processes(2, "gloo", tmp_path)


def test_point_to_point():
    def body(group):
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        group.send(part(group.rank), right)
        assert torch.equal(group.recv(part(0), left), part(left))

    run_threads(3, body)


def test_sum_order_is_visible_in_the_bits():
    """A chunked rank-order sum is not any sum: the reverse order differs somewhere."""
    parts = [part(rank, torch.float32) for rank in range(16)]
    assert not torch.equal(rank_ordered_sum(parts), rank_ordered_sum(parts[::-1]))
    by_hand = sum(parts[1:8], parts[0]) + sum(parts[9:], parts[8])
    assert torch.equal(rank_ordered_sum(parts), by_hand)


def test_a_failing_rank_ends_the_others():
    def body(group):
        if group.rank == 1:
            raise RuntimeError("rank 1 is broken")
        group.all_reduce(torch.ones(2))

    with pytest.raises(RuntimeError, match="rank 1 is broken"):
        run_threads(3, body)


def test_a_late_rank_is_named():
    def body(group):
        if group.rank == 0:
            group.all_reduce(torch.ones(2))

    with pytest.raises(EngineError, match=r"rank 0 waited 0\.2 s for rank 1"):
        run_threads(2, body, deadline_s=0.2)


def test_uneven_reduce_scatter_is_refused():
    def body(group):
        group.reduce_scatter(torch.ones(3, 2))

    with pytest.raises(ValueError, match="do not divide by 2 ranks"):
        run_threads(2, body)
