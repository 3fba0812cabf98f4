"""An input whose elements a step holds: read once, and found again after a restore.

A step that holds elements (the buffer of a shuffle) saves none of them. It saves a *mark*, a state
of its input at or before the oldest element that it holds, and how much was read since. After a
restore what it held is read again from there, and all else is passed over.

Rule 1. Ordinals count the elements of the input from its start. One that failed counts as none; it
        fails again when it is read again, and its error is not raised a second time.
Rule 2. The state is bounded, and so is the way back: a mark is made every so many elements, and
        those that lie before all that is held are forgotten (`forget_before`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.errors import DataLossError
from headrace.execution.intake import Intake, Live
from headrace.execution.iterator import ElementIterator, State

__all__ = ["Mark", "Reread"]

_MOST_AT_ONCE = 1024
_NEAR = 64
"""Elements between two that are needed which are read as well, where reading costs no call."""


class Mark(NamedTuple):
    """A place from which the input can be read again."""

    ordinal: int
    """Elements of the input before it."""
    failures: int
    """Elements before it that failed."""
    state: State

    def saved(self, read: int, failures: int) -> dict[str, Any]:
        """Return what a state says of an input of which so many were read, and so many failed."""
        return {
            "from": self.ordinal,
            "read": read - self.ordinal,
            "failed": failures - self.failures,
            "input": self.state,
        }


class Reread:
    """Reads an input in order, and parts of it again.

    Args:
        input_: The input.
        step: The step that holds its elements, for errors.
        every: Elements from one mark to the next.
    """

    def __init__(self, input_: ElementIterator, step: str, every: int) -> None:
        self._intake = Intake(input_)
        self._step = step
        self._every = every
        self._begin()

    @property
    def input(self) -> ElementIterator:
        """What is read."""
        return self._intake.input

    def _begin(self) -> None:
        self.read = 0
        """Elements of the input that were read."""
        self.failures = 0
        """Elements of the input that failed."""
        #: Oldest first. The first is at or before the oldest element that is held.
        self._marks: deque[Mark] = deque()
        self._early: Chunk | None = None  # read while failures were expected

    @property
    def oldest_mark(self) -> Mark:
        """The mark that a state names."""
        return self._marks[0] if self._marks else Mark(0, 0, self._intake.get_state())

    def pull(self, limit: int) -> Chunk | None:
        """Return the next 1 to `limit` elements, or None at the end."""
        self._mark()
        chunk, self._early = self._early, None
        if chunk is None:
            try:
                chunk = self._intake.take(limit)
            except Exception:
                self.failures += 1
                raise
        if chunk is not None:
            self.read += chunk.size
        return chunk

    def singles(self) -> Live | None:
        """Return the next elements, to be taken one by one; None at the end.

        Whoever took some says so (`took`), and drops them with their end or an error.
        """
        self._mark()
        try:
            return self._intake.singles()
        except Exception:
            self.failures += 1
            raise

    def took(self, live: Live, count: int) -> None:
        """Take note that so many of `singles` were taken."""
        live.taken += count
        self.read += count

    def drop_singles(self, *, failed: bool) -> None:
        """Take note that `singles` have ended: with their last element or an error."""
        self.failures += failed
        self._intake.drop_singles()

    def _mark(self) -> None:
        if not self._marks or self.read - self._marks[-1].ordinal >= self._every:
            self._marks.append(Mark(self.read, self.failures, self._intake.get_state()))

    def forget_before(self, ordinal: int) -> None:
        """Forget the marks that are of no use for elements from this one on."""
        while len(self._marks) > 1 and self._marks[1].ordinal <= ordinal:
            self._marks.popleft()

    def keep_for(self, ordinals: Iterable[int]) -> None:
        """Forget the marks that are of no use for elements of these ordinals, and of those to come.

        Where some elements are held for long, marks between them would be ever more.
        """
        marks = self._marks
        starts = [mark.ordinal for mark in marks]
        useful = {bisect_right(starts, ordinal) - 1 for ordinal in ordinals}
        useful.add(len(marks) - 1)
        self._marks = deque([mark for place, mark in enumerate(marks) if place in useful])

    def restore(self, saved: State, needed: NDArray[np.int64]) -> list[Chunk]:
        """Go to where a state was saved; return elements that were held then, read again.

        Args:
            saved: A state that has what `Mark.saved` returned.
            needed: Ordinals of the elements, in order.

        Raises:
            DataLossError: The input is shorter than it was.
        """
        self._intake.set_state(saved["input"])
        self._begin()
        first, failures = saved["from"], saved["failed"]
        stop = first + saved["read"]
        self._marks.append(Mark(first, 0, saved["input"]))
        self.read = first
        if failures:
            chunks = self._read_all(needed, stop, failures)
        else:
            chunks = self._read_needed(needed)
            left = stop - self.read
            if left and self.input.skip(left) < left:
                raise self._too_short()
        self.read, self.failures = stop, failures
        return chunks

    def _read_needed(self, needed: NDArray[np.int64]) -> list[Chunk]:
        """Return the elements of these ordinals, in order; pass over all others."""
        chunks: list[Chunk] = []
        gap = _NEAR if self.input.reads_ahead_freely else 1
        for run in np.split(needed, np.flatnonzero(np.diff(needed) > gap) + 1):
            if not len(run):
                break
            between = int(run[0]) - self.read
            if between and self._intake.skip(between) < between:
                raise self._too_short()
            self.read += between
            done = 0
            while done < len(run):
                self._mark()
                chunk = self._intake.take(int(run[-1]) + 1 - self.read)
                if chunk is None:
                    raise self._too_short()
                end = int(np.searchsorted(run, self.read + chunk.size))
                if end > done:
                    chunks.append(chunk.take(run[done:end] - self.read))
                done = end
                self.read += chunk.size
        return chunks

    def _read_all(self, needed: NDArray[np.int64], stop: int, failures: int) -> list[Chunk]:
        """Return the elements of these ordinals, in order, of a stream with failures in it.

        Which elements those are shows only when all are read.
        """
        chunks: list[Chunk] = []
        done = 0
        while self.read < stop or self.failures < failures:
            self._mark()
            try:
                chunk = self._intake.take(max(1, min(stop - self.read, _MOST_AT_ONCE)))
            except Exception:
                self.failures += 1
                if self.failures > failures:
                    raise
                continue
            if chunk is None:
                raise self._too_short()
            if self.read >= stop:  # it did not fail this time: the next element
                self._early = chunk
                break
            end = int(np.searchsorted(needed, self.read + chunk.size))
            if end > done:
                chunks.append(chunk.take(needed[done:end] - self.read))
            done = end
            self.read += chunk.size
        return chunks

    def _too_short(self) -> DataLossError:
        return DataLossError(
            f"the input of {self._step} is shorter than when the state was saved; restore it with "
            "the same data"
        )

    def close(self) -> None:
        """Close the input."""
        self._intake.close()
