"""Directories that are written as a whole or not at all."""

import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tercel.errors import CheckpointError, ConfigError


@contextmanager
def staged(target: Path, action: str) -> Iterator[Path]:
    """A new directory beside `target` that takes its place at the end, or is gone.

    Args:
        action: what is done, for the error of a full disk.

    Raises:
        CheckpointError: something cannot be written.
        ConfigError: another process writes to `target` now.
    """
    place = target.resolve()
    _remove_abandoned(target)
    staging = place.with_name(f".{place.name}.{secrets.token_hex(4)}.partial")
    try:
        staging.mkdir()
        with _locked(staging, target):
            yield staging
        os.replace(staging, place)
    except OSError as error:
        raise CheckpointError(f"{target}: {action} failed: {error}; nothing was written") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_abandoned(target: Path) -> None:
    """Removes what processes that were killed have left: a live one holds a lock on its own."""
    place = target.resolve()
    for partial in place.parent.glob(f".{glob.escape(place.name)}.*.partial"):
        with _locked(partial, target):
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(directory: Path, target: Path) -> Iterator[None]:
    """A lock that goes with its holder, whichever way that ends."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"out: another process makes {target} and writes to {directory}; wait for its end or "
            "choose another directory"
        ) from error
    finally:
        os.close(file)
