"""The free list of a segment: which byte ranges are allocated; numbers only, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["PAGE", "FreeList"]

PAGE = 4096
"""Unit of slot sizes, in bytes."""


class FreeList:
    """Allocates ranges of 0 .. `size`: first fit, whole pages, neighbours merged on release."""

    #: `_starts` and `_ends` are sorted; range i is _starts[i] .. _ends[i], never empty, and never
    #: touches range i + 1. `_allocated` maps the start of each allocated range to its length.

    def __init__(self, size: int) -> None:
        self.size: int = size - size % PAGE
        self._starts = [0] if self.size else []
        self._ends = [self.size] if self.size else []
        self._allocated: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.size - sum(self._allocated.values())

    @property
    def is_unused(self) -> bool:
        return not self._allocated

    def allocate(self, size: int) -> int | None:
        """Allocate `size` bytes, and return their start; None if no gap is large enough."""
        size = max(PAGE, -(-size // PAGE) * PAGE)
        for index, start in enumerate(self._starts):
            rest = self._ends[index] - start - size
            if rest < 0:
                continue
            if rest:
                self._starts[index] = start + size
            else:
                del self._starts[index], self._ends[index]
            self._allocated[start] = size
            return start
        return None

    def release(self, start: int) -> None:
        """Release an allocated range.

        Raises:
            KeyError: If no allocated range starts there.
        """
        end = start + self._allocated.pop(start)
        index = bisect_left(self._starts, start)
        joins_next = index < len(self._starts) and self._starts[index] == end
        joins_last = index > 0 and self._ends[index - 1] == start
        if joins_next and joins_last:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_next:
            self._starts[index] = start
        elif joins_last:
            self._ends[index - 1] = end
        else:
            insort(self._starts, start)
            insort(self._ends, end)
