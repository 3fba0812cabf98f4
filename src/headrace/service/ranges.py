"""Sets of whole numbers as ranges: (start, stop) pairs, ascending, apart and none of them empty.

A task's *dealt order* numbers its units from 0 as they were dealt; `runs` are the ranges of the
stream that it was dealt, in that order, which need not ascend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

__all__ = [
    "Ranges",
    "at_least",
    "common",
    "count",
    "drop_first",
    "first",
    "first_missing",
    "located",
    "numbered",
    "subtracted",
    "united",
]

Ranges: TypeAlias = tuple[tuple[int, int], ...]


def count(ranges: Iterable[tuple[int, int]]) -> int:
    """Return how many numbers there are in ranges that do not overlap."""
    return sum([stop - start for start, stop in ranges]) if ranges else 0


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the set of all numbers in the ranges, which may overlap and stand in any order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def subtracted(whole: Ranges, part: Ranges) -> Ranges:
    """Return what is in `whole`, of which ranges may be empty, and not in `part`."""
    if not whole:
        return ()
    if not part:
        return tuple([each for each in whole if each[0] < each[1]])
    left: list[tuple[int, int]] = []
    gone = iter(part)
    gap = next(gone, None)
    for start, stop in whole:
        while gap is not None and gap[1] <= start:
            gap = next(gone, None)
        while gap is not None and gap[0] < stop:
            if start < gap[0]:
                left.append((start, gap[0]))
            start = gap[1]
            if start >= stop:
                break
            gap = next(gone, None)
        if start < stop:
            left.append((start, stop))
    return tuple(left)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return what is in both."""
    if not (one and other):
        return ()
    return subtracted(one, subtracted(one, other))


def first(number: int) -> Ranges:
    """Return the numbers from 0 to `number` - 1."""
    return ((0, number),) if number else ()


def first_missing(ranges: Ranges) -> int:
    """Return the first number from 0 on that is not in `ranges`."""
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0


def at_least(ranges: Ranges, least: int) -> Ranges:
    """Return the numbers from `least` on."""
    if not ranges:
        return ()
    return tuple((max(start, least), stop) for start, stop in ranges if stop > least)


def drop_first(runs: list[tuple[int, int]], number: int) -> None:
    """Take the first `number` units off the front of some runs."""
    whole = 0
    for start, stop in runs:
        if number < stop - start:
            break
        number -= stop - start
        whole += 1
    del runs[:whole]
    if number:
        start, stop = runs[0]
        runs[0] = (start + number, stop)


def located(runs: Iterable[tuple[int, int]], first: int, dealt: Ranges) -> Ranges:
    """Return where in the stream units in dealt order are.

    Args:
        runs: What was dealt, from the unit that is number `first` in dealt order.
        first: See `runs`.
        dealt: Units in dealt order, none before `first`.
    """
    return united(_pieces(runs, first, dealt))


def numbered(runs: Iterable[tuple[int, int]], first: int, units: Ranges) -> Ranges:
    """Return the numbers in dealt order of units of the stream: `located` the other way round."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        inside = common(((start, stop),), units)
        found += [(first + begin - start, first + end - start) for begin, end in inside]
        first += stop - start
    return united(found)


def _pieces(
    runs: Iterable[tuple[int, int]], first: int, dealt: Ranges
) -> Iterator[tuple[int, int]]:
    # Both ascend in dealt order, so each is gone through once.
    at = 0
    for start, stop in runs:
        last = first + stop - start
        while at < len(dealt) and dealt[at][0] < last:
            begin, end = dealt[at]
            if end > first:
                yield start + max(begin, first) - first, start + min(end, last) - first
            if end > last:
                break
            at += 1
        first = last
