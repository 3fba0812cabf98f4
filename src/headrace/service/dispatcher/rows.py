"""Elements of units, by their ordinals: which of them somebody has, or is still to give.

An *origin* names an element: the unit that it is of, and its ordinal among the elements that the
unit gives, which are the same and in the same order wherever the unit is read. Origins travel as
runs, (unit, units, first, count): `units` units from `unit` on, and of each `count` ordinals from
`first` on. Here and on the way between the roles, units are in dealt order.

Rule. How many elements a unit has, nobody needs to know beforehand: what it gives ends at `END`.
      Where a unit is read to its end, the ordinals after its last are given with it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TypeAlias

from headrace.service.dispatcher.ranges import Ranges, at_least, subtracted, united

__all__ = ["END", "EVERYTHING", "OriginRun", "Parts", "Rows", "count_rows", "first_rows", "outside"]

END = 1 << 62
EVERYTHING: Ranges = ((0, END),)
"""All ordinals of a unit."""

OriginRun: TypeAlias = tuple[int, int, int, int]
"""(unit, units, first ordinal of each, how many)"""
Parts: TypeAlias = tuple[tuple[int, Ranges], ...]
"""Units, ascending, each with some of its ordinals."""


class Rows:
    """A set of elements of units."""

    def __init__(self) -> None:
        self._whole: list[tuple[int, int]] = []
        self._parts: dict[int, Ranges] = {}

    @property
    def whole(self) -> Ranges:
        """Units of which all elements are in the set."""
        return tuple(self._whole)

    @property
    def parts(self) -> Parts:
        """The other units of which some are."""
        return tuple(sorted(self._parts.items()))

    def but(self, units: Ranges) -> Parts:
        """Return all units of which some are, unit by unit, except for `units`."""
        whole = (
            (unit, EVERYTHING)
            for start, stop in subtracted(self.whole, units)
            for unit in range(start, stop)
        )
        return tuple(sorted((*outside(self.parts, units), *whole)))

    def __bool__(self) -> bool:
        return bool(self._whole or self._parts)

    def add(self, origins: Iterable[OriginRun]) -> None:
        """Add elements."""
        came: dict[int, list[tuple[int, int]]] = {}
        for unit, units, first, number in _joined(origins):
            stop = first + number
            if first == 0 and stop >= END:
                self.add_whole(unit, unit + units)
                continue
            for each in range(unit, unit + units):
                came.setdefault(each, []).append((first, stop))
        for each, more in came.items():
            # Once for each unit: where units are mixed, one may have many ranges.
            rows = united((*self._parts.get(each, ()), *more))
            if rows == EVERYTHING:
                self.add_whole(each, each + 1)
            else:
                self._parts[each] = rows

    def add_whole(self, start: int, stop: int) -> None:
        """Add all elements of units `start` to `stop` - 1."""
        if start >= stop:
            return
        if self._parts:
            for each in [each for each in self._parts if start <= each < stop]:
                del self._parts[each]
        whole = self._whole
        if whole and whole[-1][0] <= start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(whole[-1][1], stop))
            return
        place = bisect_left(whole, (start, stop))
        near = whole[max(0, place - 1) :]
        del whole[max(0, place - 1) :]
        whole.extend(united((*near, (start, stop))))

    def forget(self, before: int) -> None:
        """Forget units before this one."""
        self._whole = list(at_least(self.whole, before))
        for each in [each for each in self._parts if each < before]:
            del self._parts[each]


def _joined(origins: Iterable[OriginRun]) -> list[OriginRun]:
    """Return the same elements; what lies together of the same units is one run."""
    found: list[OriginRun] = []
    places: dict[tuple[int, int], int] = {}
    for unit, units, first, number in origins:
        place = places.get((unit, units))
        if place is not None and found[place][2] + found[place][3] == first:
            found[place] = (unit, units, found[place][2], found[place][3] + number)
        else:
            places[unit, units] = len(found)
            found.append((unit, units, first, number))
    return found


def first_rows(origins: Iterable[OriginRun], number: int) -> list[OriginRun]:
    """Return the first `number` elements of runs that stand in the order of the elements."""
    found: list[OriginRun] = []
    for unit, units, first, each in origins:
        whole = min(units, number // each)
        if whole:
            found.append((unit, whole, first, each))
        number -= whole * each
        if whole < units:
            if number:
                found.append((unit + whole, 1, first, number))
            break
    return found


def count_rows(runs: Iterable[OriginRun]) -> int:
    """Return how many elements there are in runs, without those after the last of a unit."""
    return sum(units * number for _, units, first, number in runs if first + number < END)


def outside(parts: Parts, units: Ranges) -> Parts:
    """Return the parts of units that are not among `units`."""
    starts = [start for start, _ in units]

    def is_among(unit: int) -> bool:
        place = bisect_right(starts, unit) - 1
        return place >= 0 and unit < units[place][1]

    return tuple(each for each in parts if not is_among(each[0]))
