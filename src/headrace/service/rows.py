"""Elements of units, by their ordinals: which of them somebody has, or is still to give.

An *origin* names an element: the unit that it is of, and its ordinal among the elements that the
unit gives, which are the same and in the same order wherever the unit is read. Origins travel as
runs, (unit, units, first, count): `units` units from `unit` on, and of each `count` ordinals from
`first` on. Here and on the way between the roles, units are in dealt order.

Rule. How many elements a unit has, nobody needs to know beforehand: what it gives ends at `END`.
      Where a unit is read to its end, the ordinals after its last are given with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.service.ranges import Ranges, at_least, subtracted, united

__all__ = ["END", "EVERYTHING", "OriginRun", "Parts", "Rows", "count_rows", "first_rows", "outside"]

END = 1 << 62
_FEW = 16
"""Ranges up to which Python is faster than NumPy."""
_MANY = 1024
"""Runs that are added before they are made up: about 100 bytes each."""
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
        #: Of other units: their ranges, as an array (n, 2) where there are many.
        self._parts: dict[int, Ranges | NDArray[np.int64]] = {}
        #: What was added since the others were made up: often nobody ever asks.
        self._added: list[OriginRun] = []
        self._forgotten = 0

    @property
    def whole(self) -> Ranges:
        """Units of which all elements are in the set."""
        self._make_up()
        return tuple(self._whole)

    @property
    def parts(self) -> Parts:
        """The other units of which some are."""
        self._make_up()
        return tuple((unit, _as_ranges(self._parts[unit])) for unit in sorted(self._parts))

    def but(self, units: Ranges) -> Parts:
        """Return all units of which some are, unit by unit, except for `units`."""
        whole = (
            (unit, EVERYTHING)
            for start, stop in subtracted(self.whole, units)
            for unit in range(start, stop)
        )
        return tuple(sorted((*outside(self.parts, units), *whole)))

    def __bool__(self) -> bool:
        self._make_up()
        return bool(self._whole or self._parts)

    def add(self, origins: Iterable[OriginRun]) -> None:
        """Add elements."""
        self._added += origins
        if len(self._added) >= _MANY:
            self._make_up()

    def _make_up(self) -> None:
        """Have what was added among the others, and nothing that was forgotten."""
        added, self._added = self._added, []
        came: dict[int, list[tuple[int, int]]] = {}
        whole: list[tuple[int, int]] = []
        for unit, units, first, number in _joined(added):
            stop = first + number
            if first == 0 and stop >= END:
                whole.append((unit, unit + units))
            elif units == 1:
                came.setdefault(unit, []).append((first, stop))
            else:
                for each in range(unit, unit + units):
                    came.setdefault(each, []).append((first, stop))
        for each, more in came.items():
            # Once for each unit: where units are mixed, one may have many ranges.
            rows = _with(self._parts.get(each, ()), more)
            if isinstance(rows, tuple) and rows == EVERYTHING:
                whole.append((each, each + 1))
            else:
                self._parts[each] = rows
        if whole:
            self._whole = list(united((*self._whole, *whole)))
        if self._whole and self._whole[0][0] < self._forgotten:
            self._whole = list(at_least(tuple(self._whole), self._forgotten))
        self._parts = {
            each: self._parts[each]
            for each in _outside(self._parts, self._whole)
            if each >= self._forgotten
        }

    def add_whole(self, start: int, stop: int) -> None:
        """Add all elements of units `start` to `stop` - 1."""
        if start >= stop:
            return
        if self._added:
            unit, units, first, number = self._added[-1]
            if unit + units == start and first == 0 and number == END:  # most often
                self._added[-1] = (unit, stop - unit, 0, END)
                return
        self.add([(start, stop - start, 0, END)])

    def add_with_whole(self, origins: Iterable[OriginRun], start: int, stop: int) -> None:
        """Add elements, and all of units `start` to `stop` - 1: they are mostly of those."""
        self.add_whole(start, stop)
        others = [run for run in origins if run[0] < start or run[0] + run[1] > stop]
        if others:
            self.add(others)

    def forget(self, before: int) -> None:
        """Forget units before this one, for good."""
        self._forgotten = max(self._forgotten, before)


def _as_ranges(rows: Ranges | NDArray[np.int64]) -> Ranges:
    return rows if isinstance(rows, tuple) else tuple((a, b) for a, b in rows.tolist())


def _with(
    rows: Ranges | NDArray[np.int64], more: list[tuple[int, int]]
) -> Ranges | NDArray[np.int64]:
    """Return the set of what is in `rows` or in one of the other ranges."""
    if len(rows) + len(more) <= _FEW:
        return united((*_as_ranges(rows), *more))
    ranges = np.array(more, np.int64)
    if len(rows):
        ranges = np.concatenate([np.asarray(rows, np.int64), ranges])
    ranges = ranges[ranges[:, 0].argsort(kind="stable")]
    stops = np.maximum.accumulate(ranges[:, 1])
    is_last = np.ones(len(ranges), np.bool_)
    np.greater(ranges[1:, 0], stops[:-1], out=is_last[:-1])
    is_first = np.roll(is_last, 1)  # whatever follows a last one; the very last is followed by none
    found = np.stack([ranges[is_first, 0], stops[is_last]], axis=1)
    return _as_ranges(found) if len(found) <= _FEW else found


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
    left = set(_outside([each for each, _ in parts], units))
    return tuple(each for each in parts if each[0] in left)


def _outside(numbers: Iterable[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers that are in none of the ranges."""
    starts = [start for start, _ in ranges]

    def is_among(number: int) -> bool:
        place = bisect_right(starts, number) - 1
        return place >= 0 and number < ranges[place][1]

    return [number for number in numbers if not is_among(number)]
