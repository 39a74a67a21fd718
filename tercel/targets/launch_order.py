"""What a launch may read before it waits for the one before it.

A launch starts when the previous one lets it, and its wait is for that one's end. Where the
previous one let it start after a wait of its own, all before that one is over; where it did so
before, nothing more is over than when that one started. What launches wrote that are over may be
read without a wait.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tercel.errors import ContractError


class ReadTooEarly(ContractError):
    """A call reads an argument before it waits, when that need not have been written."""

    def __init__(self, site: str, argument: str, when: str, writer: str, since: list[str]) -> None:
        fix = f"pass {when}=False" if when else "wait first"
        between = f", and since then {', '.join(since)} let the next start before waiting"
        super().__init__(
            f"{site}: reads {argument} before it waits, while {writer}, which writes it, may still "
            f"run{between if since else ''}; {fix}, or put what waits first between the two"
        )
        self.site = site
        self.when = when


class LaunchOrder:
    """The launches of a program in order, and which of them may still run when the next starts."""

    def __init__(self) -> None:
        self._running: list[tuple[str, tuple[torch.Tensor, ...]]] = []
        """Oldest first, with what they write, which is kept so that no other memory looks like
        it."""
        self._writer: dict[int, int] = {}
        """Storage to the last of those that writes it."""

    def check(self, site: str, arguments: Mapping[str, Any], early: Mapping[str, str]) -> None:
        """Raises ReadTooEarly if one of the arguments that are read `early`, each with the argument
        that asks for it or an empty name, may be in the making when the next launch starts."""
        for name, when in early.items():
            value = arguments.get(name)
            index = self._writer.get(_storage(value)) if isinstance(value, torch.Tensor) else None
            if index is not None:
                since = [launch for launch, _ in self._running[index + 1 :]]
                writer = self._running[index][0]
                raise ReadTooEarly(site, name, when, writer, list(dict.fromkeys(since)))

    def launched(self, name: str, written: Iterable[Any], *, triggers_early: bool) -> None:
        """Notes a launch; `triggers_early` as of contract.Implementation."""
        if not triggers_early:
            self._running.clear()
            self._writer.clear()
        tensors = tuple(x for x in written if isinstance(x, torch.Tensor))
        self._writer.update({_storage(x): len(self._running) for x in tensors})
        self._running.append((name, tensors))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes what torch runs meanwhile: ordinary launches, which wait first."""
        with _Watch(self):
            yield


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, order: LaunchOrder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            made = results if isinstance(results, tuple | list) else (results,)
            self._order.launched(name, made, triggers_early=False)
        return results


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)
