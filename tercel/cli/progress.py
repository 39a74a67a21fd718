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


@contextmanager
def loading_bar(description: str = "Loading weights") -> Iterator[ReportProgress]:
    """Yields `report(done_bytes, total_bytes)`."""
    with _bar(description, DownloadColumn(), TransferSpeedColumn()) as update:
        yield update


@contextmanager
def progress_bar(description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yields `report(done)`, which also takes the total where it is known later."""
    with _bar(description, MofNCompleteColumn(), TimeRemainingColumn()) as update:

        def report(done: int, known_total: int | None = None) -> None:
            update(done, known_total or total)

        yield report


@contextmanager
def _bar(description: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int | None], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def update(done_bytes: int, total_bytes: int | None) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield update
