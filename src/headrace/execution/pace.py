"""Pace: how many elements to ask for at once, learnt from how long they take.

Asking for many spreads the cost of asking; asking for few brings the first soon and holds little
in memory. So a stage that reads ahead asks for one, and for twice as many each time that the
answer came within `_SOON` seconds.
"""

from __future__ import annotations

import time

from headrace.element.chunk import Chunk
from headrace.element.wire import frame_bytes
from headrace.execution.iterator import ElementIterator

__all__ = ["Pace"]

_SOON = 0.0005
_LATE = 0.005


class Pace:
    """Reads chunks from an iterator, as many elements at once as come in about a millisecond.

    Args:
        most: The most elements to ask for.
        most_bytes: The most memory that a chunk should take; larger ones spoil the processor's
            cache and gain nothing.
        least: The number to begin with.
    """

    __slots__ = ("_least", "_most", "_most_bytes", "limit")

    def __init__(self, most: int = 1024, most_bytes: int = 1 << 18, least: int = 1) -> None:
        self._least = least
        self._most = max(most, least)
        self._most_bytes = most_bytes
        self.limit = least

    def next_chunk(self, iterator: ElementIterator) -> Chunk | None:
        """Return the iterator's next chunk."""
        limit = self.limit
        start = time.perf_counter()
        chunk = iterator.next_chunk(limit)
        seconds = time.perf_counter() - start
        if chunk is None:
            return None
        if seconds > _LATE:
            self.limit = max(self._least, limit // 2)
        elif seconds < _SOON and chunk.size == limit < self._most:
            bytes_each = frame_bytes(chunk) // chunk.size + 1
            affordable = max(self._least, self._most_bytes // bytes_each)
            self.limit = min(limit * 2, self._most, affordable)
        return chunk
