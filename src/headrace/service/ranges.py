"""Sets of integers as ranges: disjoint, non-empty, ascending (start, stop) pairs.

In *assignment order*, the splits of a task are numbered from 0 as they were assigned; `runs` are
the assigned ranges of the stream in that order, which need not be ascending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

__all__ = [
    "Ranges",
    "drop_below",
    "drop_first",
    "first_missing",
    "first_n",
    "intersect",
    "locate_in_stream",
    "subtract",
    "to_assignment_order",
    "total_length",
    "union",
]

Ranges: TypeAlias = tuple[tuple[int, int], ...]


def total_length(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the total length of ranges that do not overlap."""
    return sum([stop - start for start, stop in ranges]) if ranges else 0


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of ranges, which may overlap and be in any order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def subtract(whole: Ranges, part: Ranges) -> Ranges:
    """Return the numbers in `whole`, whose ranges may be empty, that are not in `part`."""
    if not whole:
        return ()
    if not part:
        return tuple([each for each in whole if each[0] < each[1]])
    difference: list[tuple[int, int]] = []
    removed_ranges = iter(part)
    removed = next(removed_ranges, None)
    for start, stop in whole:
        while removed is not None and removed[1] <= start:
            removed = next(removed_ranges, None)
        while removed is not None and removed[0] < stop:
            if start < removed[0]:
                difference.append((start, removed[0]))
            start = removed[1]
            if start >= stop:
                break
            removed = next(removed_ranges, None)
        if start < stop:
            difference.append((start, stop))
    return tuple(difference)


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """Return the intersection of two sets."""
    if not (one and other):
        return ()
    return subtract(one, subtract(one, other))


def first_n(number: int) -> Ranges:
    """Return the numbers from 0 to `number` - 1."""
    return ((0, number),) if number else ()


def first_missing(ranges: Ranges) -> int:
    """Return the smallest number from 0 on that is not in `ranges`."""
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0


def drop_below(ranges: Ranges, least: int) -> Ranges:
    """Return the numbers of at least `least`."""
    if not ranges:
        return ()
    return tuple((max(start, least), stop) for start, stop in ranges if stop > least)


def drop_first(runs: list[tuple[int, int]], number: int) -> None:
    """Remove the first `number` splits from the front of runs, in place."""
    num_complete = 0
    for start, stop in runs:
        if number < stop - start:
            break
        number -= stop - start
        num_complete += 1
    del runs[:num_complete]
    if number:
        start, stop = runs[0]
        runs[0] = (start + number, stop)


def locate_in_stream(runs: Iterable[tuple[int, int]], first: int, splits: Ranges) -> Ranges:
    """Return the indices in the stream of splits given in assignment order.

    Args:
        runs: Assigned ranges, starting with the split that has number `first` in assignment order.
        first: See `runs`.
        splits: Splits in assignment order, none before `first`.
    """
    return union(_locate_pieces(runs, first, splits))


def to_assignment_order(runs: Iterable[tuple[int, int]], first: int, splits: Ranges) -> Ranges:
    """Return the numbers in assignment order of splits of the stream.

    Inverse of `locate_in_stream`.
    """
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        common = intersect(((start, stop),), splits)
        found += [(first + begin - start, first + end - start) for begin, end in common]
        first += stop - start
    return union(found)


def _locate_pieces(
    runs: Iterable[tuple[int, int]], first: int, splits: Ranges
) -> Iterator[tuple[int, int]]:
    # Both ascend in assignment order, so each is traversed once.
    index = 0
    for start, stop in runs:
        last = first + stop - start
        while index < len(splits) and splits[index][0] < last:
            begin, end = splits[index]
            if end > first:
                yield start + max(begin, first) - first, start + min(end, last) - first
            if end > last:
                break
            index += 1
        first = last
