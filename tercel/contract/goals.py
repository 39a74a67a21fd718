"""What a cell should take: what its bench names, or what bandwidth allows."""

from typing import Literal

from tercel.contract.receipt import Ceilings, CellTime

STREAM_BYTES = 40_000_000
"""From here on a call is a stream, which reaches STREAM_SHARE of the copy bandwidth."""
STREAM_SHARE = 0.85
FIXED_US = 2.0
"""What a smaller call may take besides its bytes."""


def goal_us(
    named: float | Literal["best peer"] | None, time: CellTime, ceilings: Ceilings
) -> float | None:
    """Microseconds; None where the goal is the best of peers that are not installed."""
    if named == "best peer":
        return min(time.peers_us.values(), default=None)
    if named is not None:
        return named
    copy_us = time.bytes / ceilings.copy_bytes_per_s * 1e6
    return copy_us / STREAM_SHARE if time.bytes >= STREAM_BYTES else copy_us + FIXED_US


def roof_us(time: CellTime, ceilings: Ceilings) -> float:
    """The least that bytes and flops take on this device."""
    return 1e6 * max(time.bytes / ceilings.copy_bytes_per_s, time.flops / ceilings.bf16_flops_per_s)
