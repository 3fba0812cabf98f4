"""Sets of elements by split and ordinal: which elements were delivered, or must still be.

An *element id* consists of the split of an element and its ordinal within the split; the elements
of a split and their order are the same wherever it is computed. Ids are exchanged as runs, (split,
splits, first, count): `splits` splits from `split` on, and of each `count` ordinals from `first`
on. Here and in messages, splits are numbered in assignment order.

Rule. The number of elements of a split need not be known in advance: its ordinals end at
`END_ORDINAL`. When a split has been read to its end, the set also contains the ordinals after its
last element.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.service.ranges import Ranges, drop_below, subtract, union

__all__ = [
    "ALL_ORDINALS",
    "END_ORDINAL",
    "ElementIdRun",
    "ElementSet",
    "PartialSplits",
    "count_elements",
    "exclude_splits",
    "first_elements",
]

END_ORDINAL = 1 << 62
_NUMPY_ABOVE = 16
"""Maximum number of ranges for which Python is faster than NumPy."""
_MAX_PENDING = 1024
"""Number of runs that are queued before they are merged, at about 100 bytes each."""
ALL_ORDINALS: Ranges = ((0, END_ORDINAL),)
"""All ordinals of a split."""

ElementIdRun: TypeAlias = tuple[int, int, int, int]
"""Run of ids: (split, number of splits, first ordinal in each, number of ordinals in each)."""
PartialSplits: TypeAlias = tuple[tuple[int, Ranges], ...]
"""Splits in ascending order, each with some of its ordinals."""


class ElementSet:
    """A set of elements."""

    def __init__(self) -> None:
        self._complete: list[tuple[int, int]] = []
        #: Ranges of ordinals of partial splits, as an array of shape (n, 2) if there are many.
        self._partial: dict[int, Ranges | NDArray[np.int64]] = {}
        #: Runs added since the last merge, which is often never needed.
        self._pending: list[ElementIdRun] = []
        self._forgotten_before = 0

    @property
    def complete_splits(self) -> Ranges:
        """Splits whose elements are all in the set."""
        self._merge_pending()
        return tuple(self._complete)

    @property
    def partial_splits(self) -> PartialSplits:
        """Splits with some, but not all, elements in the set."""
        self._merge_pending()
        return tuple((unit, _as_ranges(self._partial[unit])) for unit in sorted(self._partial))

    def excluding(self, splits: Ranges) -> PartialSplits:
        """Return all splits with elements in the set, one by one, except `splits`."""
        whole = (
            (unit, ALL_ORDINALS)
            for start, stop in subtract(self.complete_splits, splits)
            for unit in range(start, stop)
        )
        return tuple(sorted((*exclude_splits(self.partial_splits, splits), *whole)))

    def __bool__(self) -> bool:
        self._merge_pending()
        return bool(self._complete or self._partial)

    def add(self, origins: Iterable[ElementIdRun]) -> None:
        """Add elements."""
        self._pending += origins
        if len(self._pending) >= _MAX_PENDING:
            self._merge_pending()

    def _merge_pending(self) -> None:
        """Merge queued runs into the set, and remove forgotten splits."""
        added, self._pending = self._pending, []
        came: dict[int, list[tuple[int, int]]] = {}
        whole: list[tuple[int, int]] = []
        for unit, units, first, number in _join_runs(added):
            stop = first + number
            if first == 0 and stop >= END_ORDINAL:
                whole.append((unit, unit + units))
            elif units == 1:
                came.setdefault(unit, []).append((first, stop))
            else:
                for each in range(unit, unit + units):
                    came.setdefault(each, []).append((first, stop))
        for each, more in came.items():
            # Once per split, because an interleaved split may have many ranges.
            rows = _union(self._partial.get(each, ()), more)
            if isinstance(rows, tuple) and rows == ALL_ORDINALS:
                whole.append((each, each + 1))
            else:
                self._partial[each] = rows
        if whole:
            self._complete = list(union((*self._complete, *whole)))
        if self._complete and self._complete[0][0] < self._forgotten_before:
            self._complete = list(drop_below(tuple(self._complete), self._forgotten_before))
        self._partial = {
            each: self._partial[each]
            for each in _exclude(self._partial, self._complete)
            if each >= self._forgotten_before
        }

    def add_complete(self, start: int, stop: int) -> None:
        """Add all elements of splits `start` to `stop` - 1."""
        if start >= stop:
            return
        if self._pending:
            unit, units, first, number = self._pending[-1]
            if unit + units == start and first == 0 and number == END_ORDINAL:  # usual case
                self._pending[-1] = (unit, stop - unit, 0, END_ORDINAL)
                return
        self.add([(start, stop - start, 0, END_ORDINAL)])

    def add_with_complete(self, origins: Iterable[ElementIdRun], start: int, stop: int) -> None:
        """Add elements, and all of splits `start` to `stop` - 1, which contain most of them."""
        self.add_complete(start, stop)
        others = [run for run in origins if run[0] < start or run[0] + run[1] > stop]
        if others:
            self.add(others)

    def forget(self, before: int) -> None:
        """Remove splits before this one permanently."""
        self._forgotten_before = max(self._forgotten_before, before)


def _as_ranges(rows: Ranges | NDArray[np.int64]) -> Ranges:
    return rows if isinstance(rows, tuple) else tuple((a, b) for a, b in rows.tolist())


def _union(
    rows: Ranges | NDArray[np.int64], more: list[tuple[int, int]]
) -> Ranges | NDArray[np.int64]:
    """Return the union of `rows` and the other ranges."""
    if len(rows) + len(more) <= _NUMPY_ABOVE:
        return union((*_as_ranges(rows), *more))
    ranges = np.array(more, np.int64)
    if len(rows):
        ranges = np.concatenate([np.asarray(rows, np.int64), ranges])
    ranges = ranges[ranges[:, 0].argsort(kind="stable")]
    stops = np.maximum.accumulate(ranges[:, 1])
    is_last = np.ones(len(ranges), np.bool_)
    np.greater(ranges[1:, 0], stops[:-1], out=is_last[:-1])
    is_first = np.roll(is_last, 1)  # index 0 follows the very last
    found = np.stack([ranges[is_first, 0], stops[is_last]], axis=1)
    return _as_ranges(found) if len(found) <= _NUMPY_ABOVE else found


def _join_runs(origins: Iterable[ElementIdRun]) -> list[ElementIdRun]:
    """Return the same elements with adjacent runs of the same splits joined."""
    found: list[ElementIdRun] = []
    places: dict[tuple[int, int], int] = {}
    for unit, units, first, number in origins:
        place = places.get((unit, units))
        if place is not None and found[place][2] + found[place][3] == first:
            found[place] = (unit, units, found[place][2], found[place][3] + number)
        else:
            places[unit, units] = len(found)
            found.append((unit, units, first, number))
    return found


def first_elements(origins: Iterable[ElementIdRun], number: int) -> list[ElementIdRun]:
    """Return the first `number` elements of runs in the order of the elements."""
    found: list[ElementIdRun] = []
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


def count_elements(runs: Iterable[ElementIdRun]) -> int:
    """Return the number of elements in runs, without ordinals after the end of a split."""
    return sum(units * number for _, units, first, number in runs if first + number < END_ORDINAL)


def exclude_splits(parts: PartialSplits, units: Ranges) -> PartialSplits:
    """Return the parts of splits that are not among `units`."""
    left = set(_exclude([each for each, _ in parts], units))
    return tuple(each for each in parts if each[0] in left)


def _exclude(numbers: Iterable[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers that are in none of the ranges."""
    starts = [start for start, _ in ranges]

    def is_among(number: int) -> bool:
        place = bisect_right(starts, number) - 1
        return place >= 0 and number < ranges[place][1]

    return [number for number in numbers if not is_among(number)]
