"""All requests through their block tables."""

from tercel.ops._lib.block_attention import attend as block_attention

__all__ = ["block_attention"]
