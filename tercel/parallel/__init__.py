"""Groups of ranks and how they are started."""

from tercel.core.group import SingleGroup
from tercel.parallel.threads import ThreadGroup, run_threads

__all__ = ["SingleGroup", "ThreadGroup", "run_threads"]
