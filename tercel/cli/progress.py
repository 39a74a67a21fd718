"""Progress bars on stderr; silent where it is not a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tercel.runtime.runner import ReportProgress

Report = Callable[[int, int], None]
"""report(done, total)"""


@contextmanager
def loading_bar(description: str = "Loading weights") -> Iterator[ReportProgress]:
    """Yields `report(done_bytes, total_bytes)`."""
    with _bar(description, DownloadColumn(), TransferSpeedColumn()) as report:
        yield lambda done_bytes, total_bytes, waiting="": report(done_bytes, total_bytes)


@contextmanager
def counting_bar(description: str) -> Iterator[Report]:
    """Yields `report(done, total)`."""
    with _bar(description, MofNCompleteColumn(), TimeRemainingColumn()) as report:
        yield report


@contextmanager
def _bar(description: str, *figures: ProgressColumn) -> Iterator[Report]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *figures)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report
