"""Standard input as text, where it is a pipe or a file."""

import sys
from collections.abc import Iterator
from io import TextIOWrapper

from tercel.errors import RequestError


def lines() -> Iterator[str]:
    """Its lines, in UTF-8 whatever the locale.

    Raises:
        RequestError: it is not UTF-8.
    """
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise RequestError("prompt", f"standard input is not UTF-8: {error}") from error
