"""An input whose elements a step holds: read once, and read again after a restore.

A step that holds elements (the buffer of a shuffle) saves none of them. It saves a *mark*, which is
a state of its input at or before the oldest element it holds, and the number of elements read
since. After a restore it reads the held elements again from the mark, and skips the others.

Rule 1. Ordinals count the elements of the input from its start. Failed elements are not counted;
        they fail again when read again, and their errors are not raised a second time.
Rule 2. The size of the state and the distance to read again are bounded: marks are made at regular
        intervals, and marks before all held elements are discarded (`discard_marks_before`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.ownership import copy_element
from headrace.element.structure import Element
from headrace.errors import DataLossError
from headrace.execution.input_buffer import InputBuffer, LazyRowStream
from headrace.execution.iterator import ElementIterator, State

__all__ = [
    "MARK_INTERVAL",
    "ReplayMark",
    "ReplayableInput",
    "decode_gaps",
    "encode_gaps",
    "rows_to_hold",
]

MARK_INTERVAL = 64
"""Number of elements between the marks of a step that holds any elements of its input; also the
maximum to read at once if that is free."""
_MAX_READ_AT_ONCE = 1024
_MAX_GAP = 64
"""Maximum gap between needed elements that is read, not skipped, if reading makes no calls."""
_MIN_PRUNE_INTERVAL = 4 * MARK_INTERVAL


class ReplayMark(NamedTuple):
    """A saved state of the input, for reading it again."""

    ordinal: int
    """Number of elements before the mark."""
    num_failed: int
    """Number of failed elements before the mark."""
    state: State

    def to_json(self, num_read: int, num_failed: int) -> dict[str, Any]:
        """Return the JSON state of an input after `num_read` elements and `num_failed` failures."""
        return {
            "first_ordinal": self.ordinal,
            "num_read": num_read - self.ordinal,
            "failed": num_failed - self.num_failed,
            "input": self.state,
        }


class ReplayableInput:
    """Reads an input in order, and reads parts of it again after a restore.

    Args:
        input_: The input.
        step: The step that holds its elements, for errors.
        mark_interval: Number of elements between marks.
    """

    def __init__(self, input_: ElementIterator, step: str, mark_interval: int) -> None:
        self._input_buffer = InputBuffer(input_)
        self._step = step
        self._mark_interval = mark_interval
        self._reset()

    @property
    def input(self) -> ElementIterator:
        """The input iterator."""
        return self._input_buffer.input

    def _reset(self) -> None:
        self.num_read = 0
        """Number of elements read from the input."""
        self.num_failed = 0
        """Number of elements of the input that failed."""
        #: Oldest first. The first is at or before the oldest held element.
        self._marks: deque[ReplayMark] = deque()
        self._extra_chunk: Chunk | None = None  # read when another failure was expected
        self._prune_at = 0  # value of `num_read` from which `prune` discards marks

    @property
    def oldest_mark(self) -> ReplayMark:
        """The mark that is saved in states."""
        return self._marks[0] if self._marks else ReplayMark(0, 0, self._input_buffer.get_state())

    def read_chunk(self, limit: int) -> Chunk | None:
        """Return the next 1 to `limit` elements, or None at the end."""
        self._add_mark()
        chunk, self._extra_chunk = self._extra_chunk, None
        if chunk is None:
            try:
                chunk = self._input_buffer.take(limit)
            except Exception:
                self.num_failed += 1
                raise
        if chunk is not None:
            self.num_read += chunk.size
        return chunk

    def lazy_rows(self) -> LazyRowStream | None:
        """Return the next elements as a stream of lazy rows; None at the end.

        The caller reports taken rows (`record_taken`), and stops using the stream after its end or
        an error.
        """
        self._add_mark()
        try:
            return self._input_buffer.lazy_rows()
        except Exception:
            self.num_failed += 1
            raise

    def record_taken(self, rows: LazyRowStream, count: int) -> None:
        """Record that `count` of `lazy_rows` were taken."""
        rows.num_taken += count
        self.num_read += count

    def end_lazy_rows(self, *, failed: bool) -> None:
        """Record that `lazy_rows` ended, after the last element or an error."""
        self.num_failed += failed
        self._input_buffer.end_lazy_rows()

    def _add_mark(self) -> None:
        if not self._marks or self.num_read - self._marks[-1].ordinal >= self._mark_interval:
            self._marks.append(
                ReplayMark(self.num_read, self.num_failed, self._input_buffer.get_state())
            )

    def discard_marks_before(self, ordinal: int) -> None:
        """Discard the marks that are not needed for elements from `ordinal` on."""
        while len(self._marks) > 1 and self._marks[1].ordinal <= ordinal:
            self._marks.popleft()

    def discard_unused_marks(self, ordinals: Iterable[int]) -> None:
        """Discard the marks that are not needed for these ordinals or for later elements.

        If some elements are held for long, the number of marks between them would grow without
        bound.
        """
        marks = self._marks
        starts = [mark.ordinal for mark in marks]
        useful = {bisect_right(starts, ordinal) - 1 for ordinal in ordinals}
        useful.add(len(marks) - 1)
        self._marks = deque([mark for index, mark in enumerate(marks) if index in useful])

    def prune(self, held_ordinals: Callable[[], Iterable[int]]) -> None:
        """Discard unused marks, at intervals that grow with the number of held elements.

        Args:
            held_ordinals: Returns the ordinals of the elements that the step holds.
        """
        if self.num_read >= self._prune_at:
            held = list(held_ordinals())
            self.discard_unused_marks(held)
            self._prune_at = self.num_read + max(_MIN_PRUNE_INTERVAL, len(held))

    def restore(self, state: State, needed: NDArray[np.int64]) -> list[Chunk]:
        """Restore a state; return the elements that were held then, read again.

        Args:
            state: A state that includes the result of `ReplayMark.to_json`.
            needed: Ordinals of the held elements, in order.

        Raises:
            DataLossError: If the input is shorter than before.
        """
        self._input_buffer.set_state(state["input"])
        self._reset()
        first, failures = state["first_ordinal"], state["failed"]
        stop = first + state["num_read"]
        self._marks.append(ReplayMark(first, 0, state["input"]))
        self.num_read = first
        if failures:
            chunks = self._read_all(needed, stop, failures)
        else:
            chunks = self._read_needed(needed)
            remaining = stop - self.num_read
            if remaining and self.input.skip(remaining) < remaining:
                raise self._too_short()
        self.num_read, self.num_failed = stop, failures
        return chunks

    def _read_needed(self, needed: NDArray[np.int64]) -> list[Chunk]:
        """Return the elements with these ordinals, in order; skip all others."""
        chunks: list[Chunk] = []
        gap = _MAX_GAP if self.input.can_read_ahead else 1
        for run in np.split(needed, np.flatnonzero(np.diff(needed) > gap) + 1):
            if not len(run):
                break
            between = int(run[0]) - self.num_read
            if between and self._input_buffer.skip(between) < between:
                raise self._too_short()
            self.num_read += between
            num_found = 0
            while num_found < len(run):
                self._add_mark()
                chunk = self._input_buffer.take(int(run[-1]) + 1 - self.num_read)
                if chunk is None:
                    raise self._too_short()
                end = int(np.searchsorted(run, self.num_read + chunk.size))
                if end > num_found:
                    chunks.append(chunk.take(run[num_found:end] - self.num_read))
                num_found = end
                self.num_read += chunk.size
        return chunks

    def _read_all(self, needed: NDArray[np.int64], stop: int, failures: int) -> list[Chunk]:
        """Return the elements with these ordinals, in order, of an input with failures.

        All elements are read, because only reading shows which ones fail.
        """
        chunks: list[Chunk] = []
        num_found = 0
        while self.num_read < stop or self.num_failed < failures:
            self._add_mark()
            try:
                chunk = self._input_buffer.take(
                    max(1, min(stop - self.num_read, _MAX_READ_AT_ONCE))
                )
            except Exception:
                self.num_failed += 1
                if self.num_failed > failures:
                    raise
                continue
            if chunk is None:
                raise self._too_short()
            if self.num_read >= stop:  # it did not fail this time, so this is the next element
                self._extra_chunk = chunk
                break
            end = int(np.searchsorted(needed, self.num_read + chunk.size))
            if end > num_found:
                chunks.append(chunk.take(needed[num_found:end] - self.num_read))
            num_found = end
            self.num_read += chunk.size
        return chunks

    def _too_short(self) -> DataLossError:
        return DataLossError(
            f"the input of {self._step} has fewer elements than when the state was saved; "
            "restore the state with the same data"
        )

    def close(self) -> None:
        """Close the input."""
        self._input_buffer.close()


def rows_to_hold(chunk: Chunk) -> list[Element]:
    """Return the rows of a chunk; a row that is a view of a column would keep all of it alive."""
    rows = chunk.rows()
    return list(map(copy_element, rows)) if chunk.is_columnar else rows


def encode_gaps(ordinals: Sequence[int], first: int) -> list[int]:
    """Return increasing ordinals as differences, which are small numbers."""
    return [after - before for before, after in pairwise([first, *ordinals])]


def decode_gaps(gaps: Iterable[int], first: int) -> list[int]:
    """Return the ordinals from the result of `encode_gaps`."""
    return list(accumulate(gaps, initial=first))[1:]
