"""Rotary position embedding: which channels turn together, how fast, and what YaRN changes."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Yarn:
    """Frequencies for contexts `factor` times longer than those trained on. arXiv 2309.00071."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    """Rotations within the original context from which a frequency is left as it is."""
    beta_slow: float = 1.0
    """Rotations below which it is divided by the factor."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """Scale of cos and sin; None: from the factor and the two above."""


@dataclass(frozen=True)
class Rope:
    dim: int
    """Channels that turn, of each head."""
    theta: float
    interleaved: bool = False
    """Pairs are neighbours; otherwise (NeoX) one channel of each half."""
    yarn: Yarn | None = None

    @property
    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians per position of the dim / 2 pairs."""
        plain = [self.theta ** (-pair * 2 / self.dim) for pair in range(self.dim // 2)]
        if self.yarn is None:
            return tuple(plain)
        low = max(math.floor(self._pair(self.yarn.beta_fast)), 0)
        high = min(math.ceil(self._pair(self.yarn.beta_slow)), self.dim - 1)
        shares = [(pair - low) / max(high - low, 1e-3) for pair in range(self.dim // 2)]
        stretched = [min(max(share, 0.0), 1.0) for share in shares]
        return tuple(
            frequency * (1 - share) + frequency / self.yarn.factor * share
            for frequency, share in zip(plain, stretched, strict=True)
        )

    @property
    def scale(self) -> float:
        """What multiplies cos and sin."""
        yarn = self.yarn
        if yarn is None:
            return 1.0
        if yarn.attention_factor is not None:
            return yarn.attention_factor
        return _mscale(yarn.factor, yarn.mscale or 1.0) / self.sharpening

    @property
    def sharpening(self) -> float:
        """What multiplies queries and keys of MLA whole, so its square the scale of the scores."""
        yarn = self.yarn
        return 1.0 if yarn is None else _mscale(yarn.factor, yarn.mscale_all_dim or 0.0)

    def _pair(self, rotations: float) -> float:
        """The pair that makes so many rotations within the original context."""
        assert self.yarn is not None
        turns = self.yarn.original_max_position / (rotations * 2 * math.pi)
        return self.dim * math.log(turns) / (2 * math.log(self.theta))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
