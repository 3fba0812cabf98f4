"""When closures with a timeout have run for too long."""

from __future__ import annotations

import heapq

from headrace.coordinator.closure import Closure, Phase
from headrace.coordinator.decided import NEVER

__all__ = ["Deadlines"]


class Deadlines:
    """Attempts that are under way, by the time at which they have to be looked at."""

    def __init__(self) -> None:
        #: When, which closure, and which attempt at it.
        self._heap: list[tuple[float, int, int, Closure]] = []

    @property
    def first(self) -> float:
        """When to look next."""
        return self._heap[0][0] if self._heap else NEVER

    def add(self, closure: Closure, now: float) -> None:
        """Watch an attempt that was sent just now."""
        assert closure.timeout is not None
        entry = (now + closure.timeout, closure.number, closure.attempt, closure)
        heapq.heappush(self._heap, entry)

    def passed(self, now: float) -> list[Closure]:
        """Return closures that have run for too long.

        Time in which a closure waited for a thread of its worker does not count.
        """
        found: list[Closure] = []
        while self._heap and self._heap[0][0] <= now:
            _, number, attempt, closure = heapq.heappop(self._heap)
            if closure.phase is not Phase.SENT or closure.attempt != attempt or closure.is_off:
                continue
            assert closure.timeout is not None
            until = closure.timeout + (now if closure.begun_at is None else closure.begun_at)
            if until <= now:
                found.append(closure)
            else:
                heapq.heappush(self._heap, (until, number, attempt, closure))
        return found
