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
        return tuple((split, _as_ranges(self._partial[split])) for split in sorted(self._partial))

    def excluding(self, splits: Ranges) -> PartialSplits:
        """Return all splits with elements in the set, one by one, except `splits`."""
        whole = (
            (split, ALL_ORDINALS)
            for start, stop in subtract(self.complete_splits, splits)
            for split in range(start, stop)
        )
        return tuple(sorted((*exclude_splits(self.partial_splits, splits), *whole)))

    def __bool__(self) -> bool:
        self._merge_pending()
        return bool(self._complete or self._partial)

    def add(self, runs: Iterable[ElementIdRun]) -> None:
        """Add elements."""
        self._pending += runs
        if len(self._pending) >= _MAX_PENDING:
            self._merge_pending()

    def _merge_pending(self) -> None:
        """Merge queued runs into the set, and remove forgotten splits."""
        added, self._pending = self._pending, []
        new_ordinals: dict[int, list[tuple[int, int]]] = {}
        complete: list[tuple[int, int]] = []
        for first_split, num_splits, first, count in _join_runs(added):
            stop = first + count
            if first == 0 and stop >= END_ORDINAL:
                complete.append((first_split, first_split + num_splits))
            elif num_splits == 1:
                new_ordinals.setdefault(first_split, []).append((first, stop))
            else:
                for split in range(first_split, first_split + num_splits):
                    new_ordinals.setdefault(split, []).append((first, stop))
        for split, new_ranges in new_ordinals.items():
            # Once per split, because an interleaved split may have many ranges.
            ordinals = _union(self._partial.get(split, ()), new_ranges)
            if isinstance(ordinals, tuple) and ordinals == ALL_ORDINALS:
                complete.append((split, split + 1))
            else:
                self._partial[split] = ordinals
        if complete:
            self._complete = list(union((*self._complete, *complete)))
        if self._complete and self._complete[0][0] < self._forgotten_before:
            self._complete = list(drop_below(tuple(self._complete), self._forgotten_before))
        self._partial = {
            split: self._partial[split]
            for split in _exclude(self._partial, self._complete)
            if split >= self._forgotten_before
        }

    def add_complete(self, start: int, stop: int) -> None:
        """Add all elements of splits `start` to `stop` - 1."""
        if start >= stop:
            return
        if self._pending:
            split, num_splits, first, count = self._pending[-1]
            if split + num_splits == start and first == 0 and count == END_ORDINAL:  # usual case
                self._pending[-1] = (split, stop - split, 0, END_ORDINAL)
                return
        self.add([(start, stop - start, 0, END_ORDINAL)])

    def add_with_complete(self, runs: Iterable[ElementIdRun], start: int, stop: int) -> None:
        """Add elements, and all of splits `start` to `stop` - 1, which contain most of them."""
        self.add_complete(start, stop)
        others = [run for run in runs if run[0] < start or run[0] + run[1] > stop]
        if others:
            self.add(others)

    def forget(self, before: int) -> None:
        """Remove splits before this one permanently."""
        self._forgotten_before = max(self._forgotten_before, before)


def _as_ranges(ordinals: Ranges | NDArray[np.int64]) -> Ranges:
    if isinstance(ordinals, tuple):
        return ordinals
    return tuple((start, stop) for start, stop in ordinals.tolist())


def _union(
    ordinals: Ranges | NDArray[np.int64], new_ranges: list[tuple[int, int]]
) -> Ranges | NDArray[np.int64]:
    """Return the union of `ordinals` and the new ranges."""
    if len(ordinals) + len(new_ranges) <= _NUMPY_ABOVE:
        return union((*_as_ranges(ordinals), *new_ranges))
    ranges = np.array(new_ranges, np.int64)
    if len(ordinals):
        ranges = np.concatenate([np.asarray(ordinals, np.int64), ranges])
    ranges = ranges[ranges[:, 0].argsort(kind="stable")]
    stops = np.maximum.accumulate(ranges[:, 1])
    is_last = np.ones(len(ranges), np.bool_)
    np.greater(ranges[1:, 0], stops[:-1], out=is_last[:-1])
    is_first = np.roll(is_last, 1)  # index 0 follows the very last
    merged = np.stack([ranges[is_first, 0], stops[is_last]], axis=1)
    return _as_ranges(merged) if len(merged) <= _NUMPY_ABOVE else merged


def _join_runs(runs: Iterable[ElementIdRun]) -> list[ElementIdRun]:
    """Return the same elements with adjacent runs of the same splits joined."""
    joined: list[ElementIdRun] = []
    indices: dict[tuple[int, int], int] = {}
    for split, num_splits, first, count in runs:
        index = indices.get((split, num_splits))
        if index is not None and joined[index][2] + joined[index][3] == first:
            joined[index] = (split, num_splits, joined[index][2], joined[index][3] + count)
        else:
            indices[split, num_splits] = len(joined)
            joined.append((split, num_splits, first, count))
    return joined


def first_elements(runs: Iterable[ElementIdRun], number: int) -> list[ElementIdRun]:
    """Return the first `number` elements of runs in the order of the elements."""
    found: list[ElementIdRun] = []
    for split, num_splits, first, count in runs:
        num_complete = min(num_splits, number // count)
        if num_complete:
            found.append((split, num_complete, first, count))
        number -= num_complete * count
        if num_complete < num_splits:
            if number:
                found.append((split + num_complete, 1, first, number))
            break
    return found


def count_elements(runs: Iterable[ElementIdRun]) -> int:
    """Return the number of elements in runs, without ordinals after the end of a split."""
    return sum(
        num_splits * count for _, num_splits, first, count in runs if first + count < END_ORDINAL
    )


def exclude_splits(partial_splits: PartialSplits, excluded: Ranges) -> PartialSplits:
    """Return the partial splits that are not in the excluded ranges."""
    included = set(_exclude([split for split, _ in partial_splits], excluded))
    return tuple(each for each in partial_splits if each[0] in included)


def _exclude(numbers: Iterable[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers that are in none of the ranges."""
    starts = [start for start, _ in ranges]

    def is_excluded(number: int) -> bool:
        index = bisect_right(starts, number) - 1
        return index >= 0 and number < ranges[index][1]

    return [number for number in numbers if not is_excluded(number)]
