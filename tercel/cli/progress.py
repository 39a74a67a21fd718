"""A progress bar on stderr while weights load; silent where stderr is not a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tercel.weights.load import Progress as Callback


@contextmanager
def loading_bar(description: str = "Loading weights") -> Iterator[Callback]:
    """Yields what `load_model` takes as `progress`."""
    console = Console(stderr=True)
    columns = (TextColumn(description), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def update(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield update
