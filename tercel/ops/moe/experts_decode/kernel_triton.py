"""The kernels of tercel/ops/_lib/kernel_experts.py at up to 64 tokens."""

from tercel.ops._lib.kernel_experts import experts_of_act as experts_decode

__all__ = ["experts_decode"]
