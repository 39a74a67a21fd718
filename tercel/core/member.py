"""One process of a group of ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """Which rank a process is, and where its group meets; see tercel.parallel.launch."""

    rank: int
    world_size: int
    local_rank: int
    """Among the ranks of its host: which of the host's devices it uses."""
    local_size: int
    """Ranks on its host."""
    host: str
    """Of the group's store."""
    port: int
    serves_store: bool = False
    """Whether the engine serves the store; else the launcher does."""
    prefix: str = ""
    """Of the keys in the store: one that the launcher serves outlives a group."""
