"""Groups of ranks and how they are started."""

from tercel.parallel.single import SingleGroup
from tercel.parallel.threads import ThreadGroup, run_threads

__all__ = ["SingleGroup", "ThreadGroup", "run_threads"]
