"""Who holds which cache pages and KDA slot. Page ids and slots serve every layer alike."""

from collections.abc import Mapping
from dataclasses import dataclass

from tercel.core.step import SINK
from tercel.errors import EngineError


@dataclass(frozen=True)
class Allocation:
    """What one request holds."""

    slot: int
    pages: tuple[int, ...]


class CacheManager:
    """Pages 1..num_pages and slots 1..num_slots; page 0 and slot 0 are the sinks of padded rows."""

    def __init__(self, *, num_pages: int, num_slots: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.page_size = page_size
        self._free_pages = list(range(num_pages, 0, -1))
        self._free_slots = list(range(num_slots, 0, -1))
        self._held: dict[str, Allocation] = {}
        self._fresh: list[int] = []

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - len(self._free_pages)

    @property
    def num_used_slots(self) -> int:
        return self.num_slots - len(self._free_slots)

    def __getitem__(self, request_id: str) -> Allocation:
        return self._held[request_id]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Gives a slot and pages for `num_tokens` positions; False, and nothing, if short of one.

        Raises:
            EngineError: the request holds something already.
        """
        if request_id in self._held:
            raise EngineError(f"request {request_id!r} already holds cache pages")
        if not self._free_slots or self.pages_for(num_tokens) > len(self._free_pages):
            return False
        pages = self._take_pages(self.pages_for(num_tokens))
        self._held[request_id] = Allocation(self._free_slots.pop(), pages)
        return True

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Adds pages until `num_tokens` positions fit; False, and nothing, if short of pages."""
        held = self._held[request_id]
        missing = self.pages_for(num_tokens) - len(held.pages)
        if missing <= 0:
            return True
        if missing > len(self._free_pages):
            return False
        self._held[request_id] = Allocation(held.slot, held.pages + self._take_pages(missing))
        return True

    def can_extend(self, num_tokens: Mapping[str, int]) -> bool:
        """Whether all these requests could be extended to so many positions each."""
        missing = (
            self.pages_for(count) - len(self._held[request_id].pages)
            for request_id, count in num_tokens.items()
        )
        return sum(max(0, count) for count in missing) <= len(self._free_pages)

    def free(self, request_id: str) -> None:
        """Takes everything back."""
        held = self._held.pop(request_id)
        self._free_pages.extend(reversed(held.pages))
        self._free_slots.append(held.slot)

    def take_fresh_pages(self) -> tuple[int, ...]:
        """Pages given out since the last call, which the next step has to clear."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def check(self) -> None:
        """Raises EngineError unless every page and slot is free or held by one request, once."""
        pages = [page for held in self._held.values() for page in held.pages]
        slots = [held.slot for held in self._held.values()]
        for what, ids, count in (
            ("page", self._free_pages + pages, self.num_pages),
            ("slot", self._free_slots + slots, self.num_slots),
        ):
            if SINK in ids or sorted(ids) != list(range(1, count + 1)):
                raise EngineError(f"{what} bookkeeping is broken: free or held are {sorted(ids)}")

    def _take_pages(self, count: int) -> tuple[int, ...]:
        pages = tuple(self._free_pages.pop() for _ in range(count))
        self._fresh.extend(pages)
        return pages
