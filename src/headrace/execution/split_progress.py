"""Counting of elements at partition boundaries: their element ids, and the finished splits.

A boundary passes the column of each chunk, with splits in assignment order, to `SplitProgress`,
which returns it as split indices and ordinals. Finished splits come with their numbers of elements,
as plain integers that can be serialized.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import DeferredMetadata
from headrace.element.compact_columns import (
    ConsecutiveSplits,
    InterleavedSplits,
    MetadataColumn,
    concatenate_columns,
)
from headrace.element.metadata import element_numbers, id_column
from headrace.execution.element_ids import find_run_sizes, find_run_starts, stable_order

__all__ = ["FinishedSplits", "SplitProgress"]

_MIN_COUNTS = 64
_MAX_UNPROCESSED = 256
_MAX_PENDING = 1 << 16


class FinishedSplits(NamedTuple):
    """Consecutive finished splits with the same number of elements at the partition boundary."""

    first_split: int
    num_splits: int
    num_elements: int


class _AssignedSpan:
    """Splits that were assigned together and have not all finished."""

    __slots__ = ("leaf", "split", "start", "stop")

    def __init__(self, leaf: int, assignment: int, stop: int, split: int) -> None:
        self.leaf = leaf
        self.start = assignment  # first split, in assignment order
        self.stop = stop
        self.split = split  # split index of the first


class _PendingIds:
    """Metadata of a chunk above the boundary, computed once its elements are counted."""

    __slots__ = ("_progress", "column", "is_counted")

    def __init__(self, progress: SplitProgress, column: MetadataColumn) -> None:
        self._progress = progress
        self.column = column
        self.is_counted = False

    def __call__(self) -> MetadataColumn:
        """Return the column."""
        if not self.is_counted:
            self._progress.count_pending()
        return self.column


class SplitProgress:
    """Counts the elements of splits at partition boundaries, by assignment order of the splits.

    Chunks may be small, and a call of NumPy costs as much as counting a thousand elements. So
    chunks are counted together, when a result that depends on the counts is requested.

    Thread-safe: boundaries may run on threads of the plan, and finished splits may be taken on
    another thread. Memory grows with the number of splits open at a time, not with the number
    assigned.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: In assignment order.
        self._spans: list[_AssignedSpan] = []
        self._num_assigned = 0  # splits that were assigned
        self._first_counted = 0  # split of the first entry of `_counts`
        #: Numbers of elements per split so far; zero after the last one.
        self._counts = np.zeros(_MIN_COUNTS, np.int64)
        #: While consecutive splits yield one element each: the splits from `_first_counted` up to
        #: this one have one element each, and `_counts` is unused. None if `_counts` is used.
        self._single_element_end: int | None = 0
        self._finished: list[FinishedSplits] = []
        #: By set of leaves: all of their splits before this one have finished. Processed lazily.
        self._finished_before: dict[frozenset[int], int] = {}
        self._last_processed = 0  # split at which `_finished_before` was last processed
        #: Columns that are not counted yet, in order and of one dtype, and their number of
        #: elements.
        self._pending: list[_PendingIds] = []
        self._num_pending = 0

    def record_assigned(self, leaf: int, assignment: int, count: int, split: int) -> None:
        """Record `count` assigned splits from `split` on, the first with number `assignment`."""
        with self._lock:
            self._spans.append(_AssignedSpan(leaf, assignment, assignment + count, split))
            self._num_assigned = assignment + count

    def add_ids(self, column: MetadataColumn) -> MetadataColumn | DeferredMetadata:
        """Count elements, in order; return their column above the boundary, or a function for it.

        Args:
            column: Column below the boundary, with splits in assignment order.
        """
        result = _PendingIds(self, column)
        with self._lock:
            if isinstance(column, ConsecutiveSplits) and not self._pending:
                firsts = self._count_first_elements(column)
                if firsts is not None:
                    return firsts
            if self._pending and self._pending[0].column.dtype != column.dtype:
                self._count_pending()
            self._pending.append(result)
            self._num_pending += len(column)
            if self._num_pending >= _MAX_PENDING:
                self._count_pending()
        return result

    def count_pending(self) -> None:
        """Count all pending columns."""
        with self._lock:
            self._count_pending()

    def _count_pending(self) -> None:
        pending, self._pending, self._num_pending = self._pending, [], 0
        if not pending:
            return
        column = self._count_column(concatenate_columns([ids.column for ids in pending]))
        start = 0
        for ids in pending:
            stop = start + len(ids.column)
            ids.column, ids.is_counted = column[start:stop], True
            start = stop

    def _count_column(self, column: MetadataColumn) -> MetadataColumn:
        """Count elements, in order; return their column above the boundary."""
        if isinstance(column, InterleavedSplits):
            return self._count_round_robin(column)
        if isinstance(column, ConsecutiveSplits):
            counted = self._count_consecutive(column)
            if counted is not None:
                return counted
            column = column.to_array()
        splits, ordinals = self._count(column["split"])
        return id_column(splits, ordinals, element_numbers(column))

    def _count_consecutive(self, column: ConsecutiveSplits) -> MetadataColumn | None:
        """Count one element of each of consecutive splits; return None if the ids are irregular."""
        firsts = self._count_first_elements(column)
        if firsts is not None:
            return firsts
        start, stop = column.first_split, column.first_split + column.size
        for span in self._spans:
            if span.start <= start and stop <= span.stop:
                break
        else:
            return None
        self._reserve_counts(stop)
        counts = self._counts[start - self._first_counted : stop - self._first_counted]
        ordinal = int(counts[0])
        if (counts != ordinal).any():
            return None
        counts += 1
        return ConsecutiveSplits(start - span.start + span.split, column.size, ordinal)

    def _count_first_elements(self, column: ConsecutiveSplits) -> MetadataColumn | None:
        """Return the ids of consecutive splits' first elements if no split has more, else None."""
        start, stop = column.first_split, column.first_split + column.size
        if start != self._single_element_end:
            return None
        self._single_element_end = stop
        found: list[MetadataColumn] = []
        for span in self._spans:
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                found.append(ConsecutiveSplits(low - span.start + span.split, high - low, 0))
        return found[0] if len(found) == 1 else concatenate_columns(found)

    def _count_round_robin(self, column: InterleavedSplits) -> InterleavedSplits:
        """Count elements of splits that are interleaved round-robin."""
        self._reserve_counts(column.max_split() + 1)
        splits, ordinals = [-1] * len(column.splits), [0] * len(column.splits)
        for number, before, size in column.split_elements():
            assignment = column.splits[number]
            splits[number] = self._split_of(assignment)
            ordinals[number] = int(self._counts[assignment - self._first_counted]) - before
            self._counts[assignment - self._first_counted] += size
        return InterleavedSplits(
            tuple(splits), column.turn_size, column.start, column.size, tuple(ordinals)
        )

    def _count(
        self, assignment: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64] | int, NDArray[np.int64]]:
        """Count elements of splits, in order; return their split indices and ordinals."""
        size = len(assignment)
        if size == 1:  # most often a batch
            return self._count_one(int(assignment[0]))
        differences = assignment[1:] - assignment[:-1]
        first, last = int(assignment[0]), int(assignment[-1])
        if last - first == size - 1 and (differences == 1).all():  # one element of each split
            return self._count_one_of_each(first, last + 1, assignment)
        highest = int(np.maximum.reduce(assignment))
        self._reserve_counts(highest + 1)
        if highest == first and not differences.any():  # all of one split
            index = first - self._first_counted
            start = int(self._counts[index])
            self._counts[index] += size
            return self._split_of(first), np.arange(start, start + size)
        return self._splits_of(assignment), self._ordinals_of(
            assignment - self._first_counted, differences
        )

    def _count_one(self, split: int) -> tuple[int, NDArray[np.int64]]:
        """Count an element of a split."""
        self._reserve_counts(split + 1)
        index = split - self._first_counted
        ordinals = self._counts[index : index + 1].copy()
        self._counts[index] += 1
        return self._split_of(split), ordinals

    def _count_one_of_each(
        self, start: int, stop: int, assignment: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64] | int, NDArray[np.int64]]:
        """Count one element of each of the splits `start` to `stop` - 1."""
        self._reserve_counts(stop)
        counts = self._counts[start - self._first_counted : stop - self._first_counted]
        ordinals = counts.copy()
        counts += 1
        for span in self._spans:
            if span.start <= start and stop <= span.stop:
                return assignment + np.int64(span.split - span.start), ordinals
        return self._splits_of(assignment), ordinals

    def _reserve_counts(self, stop: int) -> None:
        """Allocate the counts of splits before `stop`."""
        if self._single_element_end is not None:
            end, self._single_element_end = self._single_element_end, None
            self._reserve_counts(end)
            self._counts[: end - self._first_counted] = 1
        needed = stop - self._first_counted
        if needed > len(self._counts):
            counts = np.zeros(2 * needed, np.int64)
            counts[: len(self._counts)] = self._counts
            self._counts = counts

    def _split_of(self, assignment: int) -> int:
        for span in self._spans:
            if span.start <= assignment < span.stop:
                return span.split + assignment - span.start
        raise AssertionError(
            f"split {assignment}, in assignment order, has finished but yields elements"
        )

    def num_elements(self, assignment: int) -> int:
        """Return the number of elements of a split so far."""
        with self._lock:
            self._count_pending()
            self._reserve_counts(assignment + 1)
            return int(self._counts[assignment - self._first_counted])

    def position_of(self, assignment: int) -> tuple[int, int] | None:
        """Return a split's index and number of elements so far, or None if it has finished."""
        counted = self.num_elements(assignment)
        with self._lock:
            for span in self._spans:
                if span.start <= assignment < span.stop:
                    return span.split + assignment - span.start, counted
        return None

    def record_skipped(self, assignment: int, count: int) -> None:
        """Count skipped elements of a split."""
        with self._lock:
            self._count_pending()
            self._reserve_counts(assignment + 1)
            self._counts[assignment - self._first_counted] += count

    def _splits_of(self, assignment: NDArray[np.int64]) -> NDArray[np.int64]:
        low, high = int(np.minimum.reduce(assignment)), int(np.maximum.reduce(assignment))
        for span in self._spans:
            if span.start <= low and high < span.stop:
                return assignment + np.int64(span.split - span.start)
        starts = np.array([span.start for span in self._spans])
        span_shifts = np.array([span.split - span.start for span in self._spans])
        shift: NDArray[np.int64] = span_shifts[np.searchsorted(starts, assignment, "right") - 1]
        return assignment + shift

    def _ordinals_of(
        self, splits: NDArray[np.int64], differences: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        size = len(splits)
        if int(np.minimum.reduce(differences)) < 0:
            return self._ordinals_of_mixed(splits)
        starts = find_run_starts(differences != 0)
        run_splits = splits[starts]
        sizes = find_run_sizes(starts, size)
        ordinals = np.arange(size) + np.repeat(self._counts[run_splits] - starts, sizes)
        self._counts[run_splits] += sizes
        return ordinals

    def _ordinals_of_mixed(self, splits: NDArray[np.int64]) -> NDArray[np.int64]:
        order, size, lowest = stable_order(splits), len(splits), int(np.minimum.reduce(splits))
        sizes = np.bincount(splits - lowest)  # at most as many as there are counts
        counts = self._counts[lowest : lowest + len(sizes)]
        ordinals = np.empty(size, np.int64)
        ordinals[order] = np.arange(size) + np.repeat(counts - (sizes.cumsum() - sizes), sizes)
        counts += sizes
        return ordinals

    def record_finished(self, leaves: frozenset[int], assignment: int) -> None:
        """Record that all of these leaves' splits before number `assignment` have finished."""
        with self._lock:
            self._finished_before[leaves] = max(assignment, self._finished_before.get(leaves, 0))
            if assignment - self._last_processed >= _MAX_UNPROCESSED:
                self._last_processed = assignment
                self._process_finished()

    def _process_finished(self) -> None:
        """Compute the numbers of elements of finished splits."""
        self._count_pending()
        finished_before, self._finished_before = self._finished_before, {}
        for leaves, assignment in finished_before.items():
            for span in self._spans:
                if span.start >= assignment:
                    break
                if span.leaf in leaves:
                    self._finish_span(span, min(assignment, span.stop))
        self._drop_finished()

    def record_abandoned(self, assignment: int) -> None:
        """Record that a split is not read to its end."""
        with self._lock:
            self._count_pending()
            for span in self._spans:
                if span.start == assignment:
                    span.start = assignment + 1
            self._drop_finished()

    def _finish_span(self, span: _AssignedSpan, stop: int) -> None:
        if self._single_element_end is not None:
            num_counted = max(0, min(stop, self._single_element_end) - span.start)
            if num_counted:
                self._finished.append(FinishedSplits(span.split, num_counted, 1))
        else:
            counts = self._counts[span.start - self._first_counted : stop - self._first_counted]
            self._finished += _make_finished(span.split, counts)
            num_counted = len(counts)
        num_empty = stop - span.start - num_counted
        if num_empty:
            self._finished.append(FinishedSplits(span.split + num_counted, num_empty, 0))
        span.split += stop - span.start
        span.start = stop

    def _drop_finished(self) -> None:
        self._spans = [span for span in self._spans if span.start < span.stop]
        first = self._spans[0].start if self._spans else self._num_assigned
        if self._single_element_end is not None:
            self._first_counted = first
            self._single_element_end = max(first, self._single_element_end)
            return
        num_finished, num_counts = first - self._first_counted, len(self._counts)
        if num_finished <= num_counts // 2:
            return
        counts = self._counts[num_finished:]
        if not counts.any():
            self._single_element_end, counts = first, counts[:0]
        self._counts = np.zeros(max(_MIN_COUNTS, 2 * len(counts)), np.int64)
        self._counts[: len(counts)] = counts
        self._first_counted = first

    def take_finished(self) -> tuple[FinishedSplits, ...]:
        """Return the splits that finished since the last call; consecutive ones are joined."""
        with self._lock:
            if self._finished_before:
                self._process_finished()
            finished, self._finished = self._finished, []
        return tuple(_join_consecutive(finished))


def _make_finished(split: int, counts: NDArray[np.int64]) -> list[FinishedSplits]:
    """Return the finished splits from `split` on with these numbers of elements."""
    if not len(counts):
        return []
    elements = int(counts[0])
    if len(counts) == 1 or (counts == elements).all():
        return [FinishedSplits(split, len(counts), elements)]
    starts = find_run_starts(counts[1:] != counts[:-1])
    sizes = find_run_sizes(starts, len(counts))
    runs = zip(starts.tolist(), sizes.tolist(), counts[starts].tolist(), strict=True)
    return [FinishedSplits(split + start, size, elements) for start, size, elements in runs]


def _join_consecutive(finished: Iterable[FinishedSplits]) -> Sequence[FinishedSplits]:
    joined: list[FinishedSplits] = []
    for splits in finished:
        last = joined[-1] if joined else None
        if (
            last
            and last.first_split + last.num_splits == splits.first_split
            and last.num_elements == splits.num_elements
        ):
            joined[-1] = last._replace(num_splits=last.num_splits + splits.num_splits)
        else:
            joined.append(splits)
    return joined
