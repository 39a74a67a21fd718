"""Programs of one launch that meet: the later ones read what the earlier ones stored.

Counters are zero before a launch and after it, so nothing counts up from launch to launch and a
replayed graph finds what the captured one did: the last program to arrive at the last meeting, when
nobody waits any more, puts them back. All programs that wait have to be on the device at the same
time, so no launch has more than `PROGRAMS` of them.
"""

import torch
import triton
import triton.language as tl

PROGRAMS = 132
"""Multiprocessors of an H100 and an H200, each of which holds one program. A constant, since how
many programs share a row may decide bits, which should not differ between GPUs."""


def can_meet(counters: torch.Tensor | None, count: int) -> bool:
    """Whether `counters` [*] i32 allow a launch that meets at `count` of them. A CPU interprets one
    program after the other, and a smaller GPU may not hold all: a stage is a launch there."""
    if counters is None or counters.numel() < count or counters.device.type == "cpu":
        return False
    if counters.device.type != "cuda":
        return True  # cross-compiled
    return torch.cuda.get_device_properties(counters.device).multi_processor_count >= PROGRAMS


@triton.jit
def arrive(counter):
    """How many programs came before; what they stored is there for loads past the first cache."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before


@triton.jit
def wait(counter, programs):
    """Until as many have arrived."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < programs:
        pass
    tl.debug_barrier()
