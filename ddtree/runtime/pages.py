"""Page accounting: which pages of the KV pools are free, and which are never given out."""

from __future__ import annotations

DUMMY_PAGE = 0
"""Padding rows and masked-out stores write here; it is never read."""
NULL_PAGE = 1
"""Never written: unused key positions of the torch attention read its zeros."""
RESERVED_PAGES = 2
"""Pages below this number are never given to a request."""


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class PageAllocator:
    """A free list over the pages `RESERVED_PAGES .. RESERVED_PAGES + num_pages - 1`."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(RESERVED_PAGES + num_pages - 1, RESERVED_PAGES - 1, -1))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked that there are enough."""
        assert 0 <= count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Return pages to the free list."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_pages
        if len(self._free) == self.num_pages:
            # Side by side again: the torch ops read a row of consecutive pages in place.
            self._free.sort(reverse=True)
