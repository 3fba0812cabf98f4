"""Closures that wait for a worker, in the order of their numbers, whenever they came."""

from __future__ import annotations

import heapq

from headrace.coordinator.closure import Closure, Phase

__all__ = ["Ready"]


class Ready:
    """A heap; closures that are not READY any more are passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Closure]] = []

    def push(self, closure: Closure) -> None:
        """Take a closure; its phase is READY as long as it waits here."""
        closure.phase = Phase.READY
        heapq.heappush(self._heap, (closure.number, closure))

    def first(self) -> Closure | None:
        """Return the one that comes next; None: there is none."""
        heap = self._heap
        while heap:
            closure = heap[0][1]
            if closure.phase is Phase.READY:
                return closure
            heapq.heappop(heap)
        return None

    def pop(self) -> None:
        """Let go of the one that `first` returned."""
        heapq.heappop(self._heap)
