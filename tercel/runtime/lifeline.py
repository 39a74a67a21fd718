"""Processes that end with those that they serve, whichever way these end."""

import os
import select
import sys
from collections.abc import Callable


def end_with_parent(cleanup: Callable[[], None] | None = None) -> None:
    """Ends this process, even inside a long step, when its parent is gone; for a thread.

    The parent holds the other end of standard input. A process forked from it may hold that too,
    so the parent's id is watched as well.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    if cleanup is not None:
        cleanup()
    os._exit(1)
