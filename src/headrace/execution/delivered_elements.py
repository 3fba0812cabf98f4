"""Set of delivered elements: the JSON state of a plan that is read in no order.

    element ids -> DeliveredElements -> to_json: {"watermark", "delivered", "parts"}

Elements are identified by split index and ordinal (`element_ids`). All splits before the watermark
were delivered completely, and so were the "delivered" ranges after it. "parts" lists splits, as
runs, with only some ranges of ordinals delivered. All other elements remain, for any
reader of the same plan with the same seed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import FailedPreconditionError

__all__ = [
    "ALL_ORDINALS",
    "END_ORDINAL",
    "UNORDERED_STATE_MESSAGE",
    "DeliveredElements",
    "DeliveryLog",
    "RawIdRun",
    "find_missing_ordinals",
    "with_split_ends",
]

END_ORDINAL = 1 << 62
"""Ordinals after the last element of a completely delivered split count as delivered up to here.
"""
RawIdRun: TypeAlias = tuple[int, int, int, int]
"""(first split, number of splits, first ordinal of each, number of ordinals)"""
Ranges: TypeAlias = tuple[tuple[int, int], ...]
ALL_ORDINALS: Ranges = ((0, END_ORDINAL),)
UNORDERED_STATE_MESSAGE = (
    "the state says which elements came, in no order, so that the rest has none either: restore it "
    "without `ordered=True`, or in one process"
)
_MAX_PENDING_RUNS = 4096
"""Number of runs added before they are merged; often no merge is needed at all."""


class DeliveredElements:
    """A set of element ids."""

    def __init__(self) -> None:
        self._complete_splits: Ranges = ()
        self._partial_splits: dict[int, Ranges] = {}
        self._pending: list[RawIdRun] = []

    @classmethod
    def from_json(cls, position: Any) -> DeliveredElements:
        """Return the set described by a state.

        Raises:
            FailedPreconditionError: If the state does not describe such a set.
        """
        made = cls()
        try:
            whole = [_check_range(0, position["watermark"])]
            whole += [_check_range(start, stop) for start, stop in position.get("delivered", ())]
            made._complete_splits = merge_ranges(whole)
            for unit, units, rows in position.get("parts", ()):
                ends = [
                    _check_range(start, END_ORDINAL if stop is None else stop)
                    for start, stop in rows
                ]
                first, last = _check_range(unit, unit + units)
                made._partial_splits.update(dict.fromkeys(range(first, last), merge_ranges(ends)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FailedPreconditionError(
                f"the state does not say which elements were delivered: {position!r:.80}; restore "
                "one "
                "that `get_state` returned"
            ) from error
        return made

    def to_json(self) -> dict[str, Any]:
        """Return the set as a state; empty entries are omitted."""
        self._merge_pending()
        whole = list(self._complete_splits)
        frontier = whole.pop(0)[1] if whole and whole[0][0] == 0 else 0
        place: dict[str, Any] = {"watermark": frontier}
        if whole:
            place["delivered"] = [list(each) for each in whole]
        if self._partial_splits:
            place["parts"] = [
                [
                    unit,
                    units,
                    [[start, None if stop == END_ORDINAL else stop] for start, stop in rows],
                ]
                for unit, units, rows in self._group_partial_splits()
            ]
        return place

    def _group_partial_splits(self) -> list[tuple[int, int, Ranges]]:
        found: list[tuple[int, int, Ranges]] = []
        for unit, rows in sorted(self._partial_splits.items()):
            if found and found[-1][0] + found[-1][1] == unit and found[-1][2] == rows:
                found[-1] = (found[-1][0], found[-1][1] + 1, rows)
            else:
                found.append((unit, 1, rows))
        return found

    @property
    def complete_splits(self) -> Ranges:
        """Ranges of completely delivered splits."""
        self._merge_pending()
        return self._complete_splits

    @property
    def partial_splits(self) -> tuple[tuple[int, Ranges], ...]:
        """Partially delivered splits, with ranges of ordinals."""
        self._merge_pending()
        return tuple(sorted(self._partial_splits.items()))

    @property
    def watermark(self) -> int:
        """Number such that all splits before it were delivered completely."""
        whole = self.complete_splits
        return whole[0][1] if whole and whole[0][0] == 0 else 0

    def __bool__(self) -> bool:
        return bool(self._complete_splits or self._partial_splits or self._pending)

    def copy(self) -> DeliveredElements:
        """Return a copy of the set."""
        self._merge_pending()
        made = DeliveredElements()
        made._complete_splits, made._partial_splits = (
            self._complete_splits,
            dict(self._partial_splits),
        )
        return made

    def add(self, runs: Iterable[RawIdRun]) -> None:
        """Add elements."""
        self._pending += runs
        if len(self._pending) >= _MAX_PENDING_RUNS:
            self._merge_pending()

    def _merge_pending(self) -> None:
        added, self._pending = self._pending, []
        if not added:
            return
        came: dict[int, list[tuple[int, int]]] = {}
        whole: list[tuple[int, int]] = []
        for unit, units, first, count in _join_runs(added):
            stop = min(END_ORDINAL, first + count)
            if first == 0 and stop == END_ORDINAL:
                whole.append((unit, unit + units))
            else:
                for each in range(unit, unit + units):
                    came.setdefault(each, []).append((first, stop))
        for each, more in came.items():
            rows = merge_ranges((*self._partial_splits.get(each, ()), *more))
            if rows == ALL_ORDINALS:
                whole.append((each, each + 1))
            else:
                self._partial_splits[each] = rows
        if whole:
            self._complete_splits = merge_ranges((*self._complete_splits, *whole))
        starts = [start for start, _ in self._complete_splits]
        for each in [*came] if not whole else [*self._partial_splits]:
            place = bisect_right(starts, each) - 1
            if place >= 0 and each < self._complete_splits[place][1]:
                self._partial_splits.pop(each, None)


def _check_range(start: Any, stop: Any) -> tuple[int, int]:
    first, last = int(start), int(stop)
    if not 0 <= first <= last:
        raise ValueError(f"{start} to {stop} is no range")
    return first, last


def _join_runs(runs: Iterable[RawIdRun]) -> list[RawIdRun]:
    """Join consecutive runs of the same splits, including ends of splits."""
    found: list[RawIdRun] = []
    places: dict[tuple[int, int], int] = {}
    for unit, units, first, count in runs:
        place = places.get((unit, units))
        if place is not None and found[place][2] + found[place][3] == first:
            found[place] = (unit, units, found[place][2], found[place][3] + count)
        else:
            places[unit, units] = len(found)
            found.append((unit, units, first, count))
    return found


def with_split_ends(runs: Iterable[RawIdRun], ends: Iterable[RawIdRun]) -> list[RawIdRun]:
    """Return the runs, and the ends of splits whose last element is among them.

    Args:
        runs: Runs of elements.
        ends: Ordinals after the last element of finished splits.
    """
    elements, by_last = [*runs], dict[int, list[tuple[int, int]]]()
    for unit, units, last, _ in ends:
        by_last.setdefault(last, []).append((unit, unit + units))
    found = [*elements]
    for unit, units, first, count in elements:
        for start, stop in by_last.get(first + count, ()):
            low, high = max(unit, start), min(unit + units, stop)
            if low < high:
                found.append((low, high - low, first + count, END_ORDINAL - first - count))
    return found


def find_missing_ordinals(ordinals: Ranges) -> Ranges:
    """Return the ordinals of a split that are not in `ordinals`."""
    found, at = [], 0
    for start, stop in ordinals:
        if at < start:
            found.append((at, start))
        at = stop
    return (*found, (at, END_ORDINAL)) if at < END_ORDINAL else tuple(found)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges, which may overlap, as disjoint ranges in order."""
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
    id_runs: Callable[[int], Iterable[RawIdRun]]


class DeliveryLog:
    """Recent deliveries, by position.

    Args:
        base: Elements delivered before position 0.
    """

    def __init__(self, base: DeliveredElements | None = None) -> None:
        self._base = base or DeliveredElements()
        self._base_position = 0
        self._entries: deque[_Entry] = deque()

    def add(self, start: int, size: int, id_runs: Callable[[int], Iterable[RawIdRun]]) -> None:
        """Record a delivery.

        Args:
            start: Number of elements and errors delivered before it.
            size: Number of elements and errors in it.
            id_runs: Returns the ids of the first n of them; for all of them, also known ends of
                splits.
        """
        self._entries.append(_Entry(start, start + size, id_runs))

    def discard_before(self, before: int) -> None:
        """Forget the positions before `before`."""
        while self._entries and self._entries[0].stop <= before:
            entry = self._entries.popleft()
            self._base.add(entry.id_runs(entry.stop - entry.start))
            self._base_position = entry.stop

    def delivered_before(self, position: int) -> DeliveredElements:
        """Return the elements delivered before a position.

        Raises:
            FailedPreconditionError: If the position was discarded.
        """
        if position < self._base_position:
            raise FailedPreconditionError(
                f"what was delivered up to element {position} is not known any more: the reading "
                "went "
                f"on to element {self._base_position}"
            )
        found = self._base.copy()
        for start, stop, rows in self._entries:
            if start >= position:
                break
            found.add(rows(min(position, stop) - start))
        return found
