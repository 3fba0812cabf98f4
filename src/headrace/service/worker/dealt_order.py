"""Dealt order: origins as the engine says them, of units of the stream, and as a task says them.

The engine numbers units as the stream does. What goes to clients and to the dispatcher numbers them
in the order in which they were dealt to the task: so a unit that is dealt to a task twice, whose
first part went to a client that is gone, say, is two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from headrace.service.ranges import Ranges
from headrace.service.rows import END, EVERYTHING, OriginRun

__all__ = ["DealtOrder"]


_MANY = 256


class DealtOrder:
    """What was dealt to a task and may be spoken of, and what number that has there."""

    def __init__(self) -> None:
        self._dealt = 0
        #: (start, stop, number of the first), ascending and apart; and the starts.
        self._runs: list[tuple[int, int, int]] = []
        self._starts: list[int] = []
        #: Units that were dealt in part, or once more: which ordinals, and the number; the last
        #: first.
        self._again: dict[int, list[tuple[Ranges, int]]] = {}
        #: How many runs there may be until it is looked which are needed.
        self._few = _MANY

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

    def forget(self, done: int) -> None:
        """Take note that of units before number `done` no elements come, and nobody asks for ends.

        An iteration may go on for ever, and what was dealt in it grows.
        """
        if len(self._runs) + len(self._again) < self._few:
            return
        self._runs = [run for run in self._runs if run[2] + run[1] - run[0] > done]
        self._starts = [run[0] for run in self._runs]
        again = {
            unit: [each for each in dealt if each[1] >= done] for unit, dealt in self._again.items()
        }
        self._again = {unit: dealt for unit, dealt in again.items() if dealt}
        self._few = max(_MANY, 2 * (len(self._runs) + len(self._again)))

    def origins(
        self, runs: Iterable[OriginRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[OriginRun, ...]:
        """Return origins in dealt order.

        Args:
            runs: Of elements, by units of the stream.
            ended: (unit, units, elements) of units that ended: each gives no more than these. What
                was forgotten is left out.
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
            while units:
                dealt, few = self._locate(unit, units, first)
                if dealt is not None:
                    found.append((dealt, few, first, number))
                    if few == 1 and unit not in self._again:
                        known[unit] = dealt
                else:
                    assert first + number == END, f"unit {unit} is done, and gives elements"
                unit, units = unit + few, units - few
        return tuple(found)

    def _locate(self, unit: int, units: int, ordinal: int) -> tuple[int | None, int]:
        """Return the number of a unit of which this ordinal was dealt, and for how many it goes.

        None: they were forgotten.
        """
        for rows, number in self._again.get(unit, ()):
            if any(start <= ordinal < stop for start, stop in rows):
                return number, 1
        place = bisect_right(self._starts, unit) - 1
        if place < 0 or unit >= self._runs[place][1]:
            if unit in self._again:
                # Only of a unit in part can something be said that was not dealt: what follows its
                # end.
                return self._again[unit][0][1], 1
            is_last = self._again or place + 1 == len(self._starts)
            return None, 1 if is_last else min(units, self._starts[place + 1] - unit)
        start, stop, first = self._runs[place]
        few = min(units, stop - unit)
        if self._again:
            few = next((n for n in range(1, few) if unit + n in self._again), few)
        return first + unit - start, few
