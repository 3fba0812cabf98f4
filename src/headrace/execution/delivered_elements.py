"""Set of delivered elements: the JSON state of an unordered reading.

    element ids -> DeliveredElements -> to_json: {"watermark", "delivered", "partial_splits"}

Elements are identified by split index and ordinal (`element_ids`). All splits before the watermark
were delivered completely, and so were the "delivered" ranges after it. "partial_splits" lists
splits, as runs, with only some ranges of ordinals delivered. All other elements remain, for any
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
    "the state lists delivered elements in no order, so the remaining ones have no order "
    "either; restore it without `ordered=True`, or in a single process"
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
        result = cls()
        try:
            complete = [_check_range(0, position["watermark"])]
            complete += [_check_range(start, stop) for start, stop in position.get("delivered", ())]
            result._complete_splits = merge_ranges(complete)
            for first_split, num_splits, ranges in position.get("partial_splits", ()):
                ordinals = [
                    _check_range(start, END_ORDINAL if stop is None else stop)
                    for start, stop in ranges
                ]
                first, last = _check_range(first_split, first_split + num_splits)
                result._partial_splits.update(
                    dict.fromkeys(range(first, last), merge_ranges(ordinals))
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FailedPreconditionError(
                f"the state does not contain a set of delivered elements: {position!r:.80}; "
                "restore a state returned by `get_state`"
            ) from error
        return result

    def to_json(self) -> dict[str, Any]:
        """Return the set as a state; empty entries are omitted."""
        self._merge_pending()
        complete = list(self._complete_splits)
        watermark = complete.pop(0)[1] if complete and complete[0][0] == 0 else 0
        state: dict[str, Any] = {"watermark": watermark}
        if complete:
            state["delivered"] = [list(each) for each in complete]
        if self._partial_splits:
            state["partial_splits"] = [
                [
                    first_split,
                    num_splits,
                    [[start, None if stop == END_ORDINAL else stop] for start, stop in ranges],
                ]
                for first_split, num_splits, ranges in self._group_partial_splits()
            ]
        return state

    def _group_partial_splits(self) -> list[tuple[int, int, Ranges]]:
        found: list[tuple[int, int, Ranges]] = []
        for split, ranges in sorted(self._partial_splits.items()):
            if found and found[-1][0] + found[-1][1] == split and found[-1][2] == ranges:
                found[-1] = (found[-1][0], found[-1][1] + 1, ranges)
            else:
                found.append((split, 1, ranges))
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
        complete = self.complete_splits
        return complete[0][1] if complete and complete[0][0] == 0 else 0

    def __bool__(self) -> bool:
        return bool(self._complete_splits or self._partial_splits or self._pending)

    def copy(self) -> DeliveredElements:
        """Return a copy of the set."""
        self._merge_pending()
        result = DeliveredElements()
        result._complete_splits = self._complete_splits
        result._partial_splits = dict(self._partial_splits)
        return result

    def add(self, runs: Iterable[RawIdRun]) -> None:
        """Add elements."""
        self._pending += runs
        if len(self._pending) >= _MAX_PENDING_RUNS:
            self._merge_pending()

    def _merge_pending(self) -> None:
        added, self._pending = self._pending, []
        if not added:
            return
        added_ranges: dict[int, list[tuple[int, int]]] = {}
        complete: list[tuple[int, int]] = []
        for first_split, num_splits, first, count in _join_runs(added):
            stop = min(END_ORDINAL, first + count)
            if first == 0 and stop == END_ORDINAL:
                complete.append((first_split, first_split + num_splits))
            else:
                for split in range(first_split, first_split + num_splits):
                    added_ranges.setdefault(split, []).append((first, stop))
        for split, ranges in added_ranges.items():
            merged = merge_ranges((*self._partial_splits.get(split, ()), *ranges))
            if merged == ALL_ORDINALS:
                complete.append((split, split + 1))
            else:
                self._partial_splits[split] = merged
        if complete:
            self._complete_splits = merge_ranges((*self._complete_splits, *complete))
        starts = [start for start, _ in self._complete_splits]
        for split in [*added_ranges] if not complete else [*self._partial_splits]:
            index = bisect_right(starts, split) - 1
            if index >= 0 and split < self._complete_splits[index][1]:
                self._partial_splits.pop(split, None)


def _check_range(start: Any, stop: Any) -> tuple[int, int]:
    first, last = int(start), int(stop)
    if not 0 <= first <= last:
        raise ValueError(f"{start} to {stop} is not a range")
    return first, last


def _join_runs(runs: Iterable[RawIdRun]) -> list[RawIdRun]:
    """Join consecutive runs of the same splits, including ends of splits."""
    found: list[RawIdRun] = []
    last_runs: dict[tuple[int, int], int] = {}
    for first_split, num_splits, first, count in runs:
        index = last_runs.get((first_split, num_splits))
        if index is not None and found[index][2] + found[index][3] == first:
            found[index] = (first_split, num_splits, found[index][2], found[index][3] + count)
        else:
            last_runs[first_split, num_splits] = len(found)
            found.append((first_split, num_splits, first, count))
    return found


def with_split_ends(runs: Iterable[RawIdRun], ends: Iterable[RawIdRun]) -> list[RawIdRun]:
    """Return the runs, and the ends of splits whose last element is among them.

    Args:
        runs: Runs of elements.
        ends: Ordinals after the last element of finished splits.
    """
    elements, by_last = [*runs], dict[int, list[tuple[int, int]]]()
    for first_split, num_splits, last, _ in ends:
        by_last.setdefault(last, []).append((first_split, first_split + num_splits))
    found = [*elements]
    for first_split, num_splits, first, count in elements:
        for start, stop in by_last.get(first + count, ()):
            low, high = max(first_split, start), min(first_split + num_splits, stop)
            if low < high:
                found.append((low, high - low, first + count, END_ORDINAL - first - count))
    return found


def find_missing_ordinals(ordinals: Ranges) -> Ranges:
    """Return the ordinals of a split that are not in `ordinals`."""
    found, next_ordinal = [], 0
    for start, stop in ordinals:
        if next_ordinal < start:
            found.append((next_ordinal, start))
        next_ordinal = stop
    return (*found, (next_ordinal, END_ORDINAL)) if next_ordinal < END_ORDINAL else tuple(found)


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
                f"the elements delivered before position {position} are no longer known: the "
                f"iterator has advanced to position {self._base_position}"
            )
        found = self._base.copy()
        for start, stop, id_runs in self._entries:
            if start >= position:
                break
            found.add(id_runs(min(position, stop) - start))
        return found
