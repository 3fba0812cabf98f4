"""Pace: how many elements to ask for at once, learnt from how long they take.

Asking for many spreads the cost of asking; asking for few brings the first soon and holds little
in memory. So a stage that reads ahead asks for one, and for twice as many each time that the
answer came within `_SOON` seconds.

An input that does not read ahead freely gives all that it was asked for, however long its user's
function takes: ask such a one for few (`most`).
"""

from __future__ import annotations

import math
import time

from headrace.element.chunk import Chunk
from headrace.element.wire import frame_bytes
from headrace.execution.iterator import ElementIterator
from headrace.kept_memory import keep_freed_memory

__all__ = ["Pace"]

_SOON = 0.0005
_LATE = 0.005
_LONG = 0.1

# Chunks come and go, and so do batches: twice this is kept for them.
keep_freed_memory(16 << 20)


class Pace:
    """Reads chunks from an iterator, as many elements at once as come in about a millisecond.

    Args:
        most: The most elements to ask for.
        most_bytes: The most memory that a chunk should take; larger ones spoil the processor's
            cache and gain nothing.
        least: The number to begin with.
    """

    __slots__ = ("_gave_at", "_least", "_most", "_most_bytes", "limit")

    def __init__(self, most: int = 1024, most_bytes: int = 1 << 19, least: int = 1) -> None:
        self._least = least
        self._most = max(most, least)
        self._most_bytes = most_bytes
        self._gave_at = -math.inf
        self.limit = least

    def next_chunk(self, iterator: ElementIterator, least: int = 1) -> Chunk | None:
        """Return the iterator's next chunk, with all that have arrived if they are not many.

        Who takes long over a chunk is given few: before each, a reader looks whether its lease of
        what arrived has lasted.
        """
        if time.perf_counter() - self._gave_at < _LONG:
            least = max(least, min(iterator.arrived, self._most))
        return self.ask(iterator, least)

    def ask(self, iterator: ElementIterator, least: int) -> Chunk | None:
        """Return the iterator's next chunk, asking for at least `least` elements."""
        limit = self.limit
        if limit < least:
            limit = least
        start = time.perf_counter()
        chunk = iterator.next_chunk(limit)
        self._gave_at = time.perf_counter()
        seconds = self._gave_at - start
        if chunk is None:
            return None
        if seconds > _LATE:
            self.limit = max(self._least, min(limit, self._most) // 2)
        elif seconds < _SOON and self.limit < self._most:
            # By time alone: a filter gives fewer than it was asked for, however many that are.
            affordable = self._most_bytes * chunk.size // (frame_bytes(chunk) + 1)
            self.limit = max(self._least, min(self.limit * 2, self._most, affordable))
        return chunk
