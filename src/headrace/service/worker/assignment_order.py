"""Assignment order: translates element ids from splits of the stream to the order of assignment.

The engine numbers splits by their place in the stream. Clients and the dispatcher number them in
the order in which the task received them. A split that is assigned to a task twice, because its
first part went to a departed client for example, has two numbers there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from headrace.service.element_sets import ALL_ORDINALS, END_ORDINAL, ElementIdRun
from headrace.service.ranges import Ranges

__all__ = ["AssignmentOrder"]


_MIN_PRUNE_RUNS = 256


class AssignmentOrder:
    """Splits assigned to a task that ids may refer to, and their numbers in assignment order."""

    def __init__(self) -> None:
        self._assigned = 0
        #: Disjoint ascending runs (start, stop, number of the first split); and their starts.
        self._runs: list[tuple[int, int, int]] = []
        self._starts: list[int] = []
        #: Splits that were assigned in part or again: ordinals and number, latest first.
        self._reassigned: dict[int, list[tuple[Ranges, int]]] = {}
        #: Number of runs above which unneeded ones are removed.
        self._prune_above = _MIN_PRUNE_RUNS

    def assign(self, start: int, stop: int, rows: Ranges = ()) -> None:
        """Record the next assignment; `rows`, if given, restricts one split to these ordinals."""
        place = bisect_right(self._starts, start)
        is_new = not rows
        is_new = is_new and (not place or self._runs[place - 1][1] <= start)
        is_new = is_new and (place == len(self._runs) or stop <= self._runs[place][0])
        if is_new:
            self._runs.insert(place, (start, stop, self._assigned))
            self._starts.insert(place, start)
        else:
            for unit in range(start, stop):
                number = self._assigned + unit - start
                self._reassigned.setdefault(unit, []).insert(0, (rows or ALL_ORDINALS, number))
        self._assigned += stop - start

    def forget(self, completed: int) -> None:
        """Drop splits before number `completed`: no elements or ends of them will follow.

        An iteration may be infinite, and its assignments grow.
        """
        if len(self._runs) + len(self._reassigned) < self._prune_above:
            return
        self._runs = [run for run in self._runs if run[2] + run[1] - run[0] > completed]
        self._starts = [run[0] for run in self._runs]
        again = {
            unit: [each for each in dealt if each[1] >= completed]
            for unit, dealt in self._reassigned.items()
        }
        self._reassigned = {unit: dealt for unit, dealt in again.items() if dealt}
        self._prune_above = max(_MIN_PRUNE_RUNS, 2 * (len(self._runs) + len(self._reassigned)))

    def element_ids(
        self, runs: Iterable[ElementIdRun], ended: Iterable[tuple[int, int, int]]
    ) -> tuple[ElementIdRun, ...]:
        """Return element ids in assignment order.

        Args:
            runs: Element ids by split of the stream.
            ended: Ends of splits as (split, number of splits, elements per split); splits that were
                forgotten are left out.
        """
        found: list[ElementIdRun] = []
        after = ((unit, units, elements, END_ORDINAL - elements) for unit, units, elements in ended)
        known: dict[int, int] = {}  # interleaved splits occur repeatedly
        start, stop, newest = self._runs[-1] if self._runs and not self._reassigned else (0, 0, 0)
        for unit, units, first, number in (*runs, *after):
            if start <= unit and unit + units <= stop:  # usual case: the latest assignment
                found.append((newest + unit - start, units, first, number))
                continue
            if units == 1 and (place := known.get(unit)) is not None:
                found.append((place, 1, first, number))
                continue
            while units:
                dealt, few = self._locate(unit, units, first)
                if dealt is not None:
                    found.append((dealt, few, first, number))
                    if few == 1 and unit not in self._reassigned:
                        known[unit] = dealt
                else:
                    assert first + number == END_ORDINAL, f"unit {unit} is done, and gives elements"
                unit, units = unit + few, units - few
        return tuple(found)

    def _locate(self, unit: int, units: int, ordinal: int) -> tuple[int | None, int]:
        """Return the number of the split that this ordinal belongs to, and the run length.

        The number is None if the splits were forgotten.
        """
        for rows, number in self._reassigned.get(unit, ()):
            if any(start <= ordinal < stop for start, stop in rows):
                return number, 1
        place = bisect_right(self._starts, unit) - 1
        if place < 0 or unit >= self._runs[place][1]:
            if unit in self._reassigned:
                # Only for a partly assigned split, an unassigned ordinal can be mentioned: the rest
                # after its end.
                return self._reassigned[unit][0][1], 1
            is_last = self._reassigned or place + 1 == len(self._starts)
            return None, 1 if is_last else min(units, self._starts[place + 1] - unit)
        start, stop, first = self._runs[place]
        few = min(units, stop - unit)
        if self._reassigned:
            few = next((n for n in range(1, few) if unit + n in self._reassigned), few)
        return first + unit - start, few
