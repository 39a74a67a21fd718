"""Groups of ranks and how they are started."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tercel.core.group import SingleGroup
    from tercel.parallel.threads import ThreadGroup, run_threads

__all__ = ["SingleGroup", "ThreadGroup", "run_threads"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for: whoever only launches ranks does without torch."""
    if name == "SingleGroup":
        from tercel.core.group import SingleGroup

        return SingleGroup
    if name in __all__:
        from tercel.parallel import threads

        return getattr(threads, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
