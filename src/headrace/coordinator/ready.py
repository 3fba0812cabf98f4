"""Closures that wait for a worker, in the order of their numbers, whenever they came."""

from __future__ import annotations

import heapq

from headrace.coordinator.closure import Closure, Phase
from headrace.coordinator.rounds import Rounds

__all__ = ["Ready"]


class Ready:
    """A heap; closures that are not READY any more are passed over.

    Args:
        staleness: How many closures before one may not be over when it begins; None: any number.
        rounds: Says which may begin; None: all.
    """

    def __init__(self, staleness: int | None, rounds: Rounds | None) -> None:
        self._staleness = staleness
        self._rounds = rounds
        self._heap: list[tuple[int, Closure]] = []

    def push(self, closure: Closure) -> None:
        """Take a closure; its phase is READY as long as it waits here."""
        closure.phase = Phase.READY
        heapq.heappush(self._heap, (closure.number, closure))

    def first(self, low: int) -> Closure | None:
        """Return the one that comes next; None: there is none that may begin.

        Args:
            low: All closures below this number are over.
        """
        heap = self._heap
        while heap:
            closure = heap[0][1]
            if closure.phase is Phase.READY:
                return closure if self._may_begin(closure.number, low) else None
            heapq.heappop(heap)
        return None

    def _may_begin(self, number: int, low: int) -> bool:
        if self._staleness is not None and low < number - self._staleness:
            return False
        return self._rounds is None or self._rounds.may_begin(number)

    def pop(self) -> None:
        """Let go of the one that `first` returned."""
        heapq.heappop(self._heap)
