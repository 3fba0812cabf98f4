"""When a task says of units that they ended, with how many elements."""

from __future__ import annotations

from headrace.service.rows import OriginRun

__all__ = ["UnitEnds"]


class UnitEnds:
    """Units that ended and were not said to have.

    In order, that waits for the last of a unit to be said, be it an error: whoever has all elements
    of a unit that ended looks for nothing more of it.

    Args:
        in_order: Whether elements are wanted in order.
    """

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._waiting: list[OriginRun] = []

    def due(self, ended: tuple[OriginRun, ...], done: int) -> tuple[OriginRun, ...]:
        """Return what may be said now.

        Args:
            ended: Units that ended since this was asked last.
            done: All of units before this one, in dealt order, was said or is said with this.
        """
        if not self._in_order:
            return ended
        said: list[OriginRun] = []
        waiting, self._waiting = [*self._waiting, *ended], []
        for unit, units, first, count in waiting:
            few = max(0, min(units, done - unit))
            if few:
                said.append((unit, few, first, count))
            if few < units:
                self._waiting.append((unit + few, units - few, first, count))
        return tuple(said)
