"""What a CUDA graph does, on a CPU: a step's torch calls are recorded once, with the memory that
they read and write, and run again without any Python of the step."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Tape(TorchDispatchMode):
    """Records; a call that gives the host a value, or a size that depends on one, is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in HOST_READS, f"{func} reads on the host"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, kept in self.calls:
                for new, old in zip(
                    tree_leaves(func(*args, **kwargs)), tree_leaves(kept), strict=True
                ):
                    if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


class TapeCapture:
    """See tercel.runtime.graphs.Capture."""

    pool_bytes = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        tape = Tape()
        with tape:
            work()
        return tape.replay
