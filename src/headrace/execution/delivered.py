"""Which elements were delivered: a place in a plan that is read in no order, as JSON.

    origins of elements -> Delivered -> to_json: {"frontier", "delivered", "parts"}

Elements are named by units of the plan's stream and ordinals (`origins`). All units before the
*frontier* came whole, and so did the *delivered* ranges after it; of units among the *parts*, runs
of them, came the elements in some ranges of ordinals. What is left is everything else, for anybody
who reads the same plan from the same seed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import FailedPreconditionError

__all__ = [
    "END",
    "EVERYTHING",
    "NO_ORDER",
    "Delivered",
    "DeliveryLog",
    "OriginRun",
    "missing_in",
    "with_ends",
]

END = 1 << 62
"""Ordinals after the last that a unit has are delivered with its end: up to this one."""
OriginRun: TypeAlias = tuple[int, int, int, int]
"""(unit, units, first ordinal of each, how many)"""
Ranges: TypeAlias = tuple[tuple[int, int], ...]
EVERYTHING: Ranges = ((0, END),)
NO_ORDER = (
    "the state says which elements came, in no order, so that the rest has none either: restore it "
    "without `ordered=True`, or in one process"
)
_MANY = 4096
"""Runs that are added before they are made up: often nobody asks."""


class Delivered:
    """A set of elements, by their origins."""

    def __init__(self) -> None:
        self._whole: Ranges = ()
        self._parts: dict[int, Ranges] = {}
        self._added: list[OriginRun] = []

    @classmethod
    def from_json(cls, place: Any) -> Delivered:
        """Return the set that a place says.

        Raises:
            FailedPreconditionError: It says nothing of the kind.
        """
        made = cls()
        try:
            whole = [_range(0, place["frontier"])]
            whole += [_range(start, stop) for start, stop in place.get("delivered", ())]
            made._whole = united(whole)
            for unit, units, rows in place.get("parts", ()):
                ends = [_range(start, END if stop is None else stop) for start, stop in rows]
                first, last = _range(unit, unit + units)
                made._parts.update(dict.fromkeys(range(first, last), united(ends)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FailedPreconditionError(
                f"the state does not say which elements were delivered: {place!r:.80}; restore one "
                "that `get_state` returned"
            ) from error
        return made

    def to_json(self) -> dict[str, Any]:
        """Return the place: nothing that is not there is said."""
        self._make_up()
        whole = list(self._whole)
        frontier = whole.pop(0)[1] if whole and whole[0][0] == 0 else 0
        place: dict[str, Any] = {"frontier": frontier}
        if whole:
            place["delivered"] = [list(each) for each in whole]
        if self._parts:
            place["parts"] = [
                [unit, units, [[start, None if stop == END else stop] for start, stop in rows]]
                for unit, units, rows in self._parts_in_a_row()
            ]
        return place

    def _parts_in_a_row(self) -> list[tuple[int, int, Ranges]]:
        found: list[tuple[int, int, Ranges]] = []
        for unit, rows in sorted(self._parts.items()):
            if found and found[-1][0] + found[-1][1] == unit and found[-1][2] == rows:
                found[-1] = (found[-1][0], found[-1][1] + 1, rows)
            else:
                found.append((unit, 1, rows))
        return found

    @property
    def whole(self) -> Ranges:
        """Units of which all elements came."""
        self._make_up()
        return self._whole

    @property
    def parts(self) -> tuple[tuple[int, Ranges], ...]:
        """The other units of which some came."""
        self._make_up()
        return tuple(sorted(self._parts.items()))

    @property
    def frontier(self) -> int:
        """All units before this one came whole."""
        whole = self.whole
        return whole[0][1] if whole and whole[0][0] == 0 else 0

    def __bool__(self) -> bool:
        return bool(self._whole or self._parts or self._added)

    def copy(self) -> Delivered:
        """Return another one with the same elements."""
        self._make_up()
        made = Delivered()
        made._whole, made._parts = self._whole, dict(self._parts)
        return made

    def add(self, runs: Iterable[OriginRun]) -> None:
        """Add elements."""
        self._added += runs
        if len(self._added) >= _MANY:
            self._make_up()

    def _make_up(self) -> None:
        added, self._added = self._added, []
        if not added:
            return
        came: dict[int, list[tuple[int, int]]] = {}
        whole: list[tuple[int, int]] = []
        for unit, units, first, count in _joined(added):
            stop = min(END, first + count)
            if first == 0 and stop == END:
                whole.append((unit, unit + units))
            else:
                for each in range(unit, unit + units):
                    came.setdefault(each, []).append((first, stop))
        for each, more in came.items():
            rows = united((*self._parts.get(each, ()), *more))
            if rows == EVERYTHING:
                whole.append((each, each + 1))
            else:
                self._parts[each] = rows
        if whole:
            self._whole = united((*self._whole, *whole))
        starts = [start for start, _ in self._whole]
        for each in [*came] if not whole else [*self._parts]:
            place = bisect_right(starts, each) - 1
            if place >= 0 and each < self._whole[place][1]:
                self._parts.pop(each, None)


def _range(start: Any, stop: Any) -> tuple[int, int]:
    first, last = int(start), int(stop)
    if not 0 <= first <= last:
        raise ValueError(f"{start} to {stop} is no range")
    return first, last


def _joined(runs: Iterable[OriginRun]) -> list[OriginRun]:
    """Return the same elements; one after the other of the same units, and ends, are one run."""
    found: list[OriginRun] = []
    places: dict[tuple[int, int], int] = {}
    for unit, units, first, count in runs:
        place = places.get((unit, units))
        if place is not None and found[place][2] + found[place][3] == first:
            found[place] = (unit, units, found[place][2], found[place][3] + count)
        else:
            places[unit, units] = len(found)
            found.append((unit, units, first, count))
    return found


def with_ends(runs: Iterable[OriginRun], ends: Iterable[OriginRun]) -> list[OriginRun]:
    """Return elements, and the ends of units of which the last element is among them.

    Args:
        runs: The elements.
        ends: Ordinals after the last of units that have ended.
    """
    elements, by_last = [*runs], dict[int, list[tuple[int, int]]]()
    for unit, units, last, _ in ends:
        by_last.setdefault(last, []).append((unit, unit + units))
    found = [*elements]
    for unit, units, first, count in elements:
        for start, stop in by_last.get(first + count, ()):
            low, high = max(unit, start), min(unit + units, stop)
            if low < high:
                found.append((low, high - low, first + count, END - first - count))
    return found


def missing_in(rows: Ranges) -> Ranges:
    """Return the ordinals of a unit that are not in `rows`."""
    found, at = [], 0
    for start, stop in rows:
        if at < start:
            found.append((at, start))
        at = stop
    return (*found, (at, END)) if at < END else tuple(found)


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the set of all numbers in ranges, which may overlap, as ranges in order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


class _Entry(NamedTuple):
    start: int
    stop: int
    rows: Callable[[int], Iterable[OriginRun]]


class DeliveryLog:
    """What was delivered up to each place of late.

    Args:
        base: What was delivered before the first place, 0.
    """

    def __init__(self, base: Delivered | None = None) -> None:
        self._base = base or Delivered()
        self._base_at = 0
        self._entries: deque[_Entry] = deque()

    def add(self, start: int, size: int, rows: Callable[[int], Iterable[OriginRun]]) -> None:
        """Take note of a delivery.

        Args:
            start: How many elements and errors were delivered before it.
            size: How many it has.
            rows: Returns the origins of the first so many; of all, also what is known of ends.
        """
        self._entries.append(_Entry(start, start + size, rows))

    def forget(self, before: int) -> None:
        """Take note that nobody asks for a place before this one any more."""
        while self._entries and self._entries[0].stop <= before:
            entry = self._entries.popleft()
            self._base.add(entry.rows(entry.stop - entry.start))
            self._base_at = entry.stop

    def until(self, place: int) -> Delivered:
        """Return what was delivered before a place.

        Raises:
            FailedPreconditionError: That was forgotten.
        """
        if place < self._base_at:
            raise FailedPreconditionError(
                f"what was delivered up to element {place} is not known any more: the reading went "
                f"on to element {self._base_at}"
            )
        found = self._base.copy()
        for start, stop, rows in self._entries:
            if start >= place:
                break
            found.add(rows(min(place, stop) - start))
        return found
