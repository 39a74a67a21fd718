"""All heads at once."""

from tercel.ops._lib.rope import norm_rotate_heads as qk_norm_rope

__all__ = ["qk_norm_rope"]
