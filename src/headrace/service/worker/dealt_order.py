"""Dealt order: origins as the engine says them, of units of the stream, and as a task says them.

The engine numbers units as the stream does. What goes to clients and to the dispatcher numbers them
in the order in which they were dealt to the task: so a unit that is dealt to a task twice, whose
first part went to a client that is gone, say, is two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from headrace.service.dispatcher.ranges import Ranges
from headrace.service.dispatcher.rows import END, EVERYTHING, OriginRun

__all__ = ["DealtOrder"]


class DealtOrder:
    """What was dealt to a task, and what number that has there."""

    def __init__(self) -> None:
        self._dealt = 0
        #: (start, stop, number of the first), ascending and apart; and the starts.
        self._runs: list[tuple[int, int, int]] = []
        self._starts: list[int] = []
        #: Units that were dealt in part, or once more: which ordinals, and the number; the last
        #: first.
        self._again: dict[int, list[tuple[Ranges, int]]] = {}

    def deal(self, start: int, stop: int, rows: Ranges = ()) -> None:
        """Take note of units that are dealt next; `rows`: one, and only these of its elements."""
        place = bisect_right(self._starts, start)
        is_new = not rows
        is_new = is_new and (not place or self._runs[place - 1][1] <= start)
        is_new = is_new and (place == len(self._runs) or stop <= self._runs[place][0])
        if is_new:
            self._runs.insert(place, (start, stop, self._dealt))
            self._starts.insert(place, start)
        else:
            for unit in range(start, stop):
                number = self._dealt + unit - start
                self._again.setdefault(unit, []).insert(0, (rows or EVERYTHING, number))
        self._dealt += stop - start

    def origins(
        self, runs: Iterable[OriginRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[OriginRun, ...]:
        """Return origins in dealt order.

        Args:
            runs: Of elements, by units of the stream.
            ended: (unit, units, elements) of units that ended: each gives no more than these.
        """
        found: list[OriginRun] = []
        after = ((unit, units, elements, END - elements) for unit, units, elements in ended)
        known: dict[int, int] = {}  # where units are mixed, they come again and again
        start, stop, newest = self._runs[-1] if self._runs and not self._again else (0, 0, 0)
        for unit, units, first, number in (*runs, *after):
            if start <= unit and unit + units <= stop:  # what was dealt last, most often
                found.append((newest + unit - start, units, first, number))
                continue
            if units == 1 and (place := known.get(unit)) is not None:
                found.append((place, 1, first, number))
                continue
            if units == 1 and unit not in self._again:
                known[unit] = self._locate(unit, 1, first)[0]
                found.append((known[unit], 1, first, number))
                continue
            while units:
                dealt, few = self._locate(unit, units, first)
                found.append((dealt, few, first, number))
                unit, units = unit + few, units - few
        return tuple(found)

    def _locate(self, unit: int, units: int, ordinal: int) -> tuple[int, int]:
        """Return the number of a unit of which this ordinal was dealt, and for how many it goes."""
        for rows, number in self._again.get(unit, ()):
            if any(start <= ordinal < stop for start, stop in rows):
                return number, 1
        place = bisect_right(self._starts, unit) - 1
        if place < 0 or unit >= self._runs[place][1]:
            # Only of a unit in part can something be said that was not dealt: what follows its end.
            return self._again[unit][0][1], 1
        start, stop, first = self._runs[place]
        few = min(units, stop - unit)
        if self._again:
            few = next((n for n in range(1, few) if unit + n in self._again), few)
        return first + unit - start, few
