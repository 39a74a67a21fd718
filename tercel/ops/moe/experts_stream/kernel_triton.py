"""The kernels of tercel/ops/_lib/kernel_experts.py at one and two tokens."""

from tercel.ops._lib.kernel_experts import experts_of_act as experts_stream

__all__ = ["experts_stream"]
