"""Elements of one split as the client stage reads them, with states for saving."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.metadata import id_column
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.execution.context import SplitReader, SplitSource
from headrace.execution.element_ids import DeferredError, ErrorPosition, get_error_position
from headrace.execution.element_numbers import IdColumn
from headrace.execution.iterator import MAX_FAILURES, ElementIterator, State

__all__ = ["FILTERED_OUT", "MID_SPLIT_STATE_MESSAGE", "SplitElementsIterator"]

_SKIPPED_AT_ONCE = 1024
MID_SPLIT_STATE_MESSAGE = (
    "the state was saved by a single process in the middle of a split (a file, or a dataset "
    "opened by flat_map or interleave), and does not contain the number of elements read of it; "
    "restore it in a single process, or use a state saved with the data service"
)
FILTERED_OUT = -1
"""Split in the metadata of placeholders for elements that a filter dropped."""


class SplitElementsIterator(ElementIterator):
    """Iterator over the elements of one split, read from a source.

    Args:
        source: Source of splits.
        split: Split index.
        fills_gaps: Whether dropped elements get placeholders, so that they are counted.
        has_element_numbers: Whether the elements have element numbers.
        defers_errors: Whether the error of a failed element is returned in its place
            (`DeferredError`).
    """

    def __init__(
        self,
        source: SplitSource,
        split: int,
        *,
        fills_gaps: bool = False,
        has_element_numbers: bool = False,
        defers_errors: bool = False,
    ) -> None:
        self._source = source
        self._split = split
        self._fills_gaps = fills_gaps
        self._has_element_numbers = has_element_numbers
        self._defers_errors = defers_errors
        self._reader: SplitReader | None = None
        self._ordinal = 0  # of the next element
        self._num_failed = 0
        self._buffered: Chunk | None = None  # read, but not returned yet
        self._pending_error: Exception | None = None  # found, but not raised yet
        self._has_ended = False
        self._is_positioned = True

    def next_chunk(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            if not self._is_positioned:
                self._restore_position()
            chunk, self._buffered = self._buffered, None
            if chunk is None and self._pending_error is None:
                chunk = self._read(limit)
            if self._pending_error is not None:
                return self._fill_before_error(self._pending_error, limit)
            if chunk is None:
                return self._fill_at_end(limit)
            first = self._ordinal
            if self._fills_gaps:
                chunk = _fill_gaps(chunk, first)
            if chunk.size > limit:
                self._buffered = chunk.slice(limit, chunk.size)
                chunk = chunk.slice(0, limit)
            assert chunk.metadata is not None
            ordinals = chunk.metadata["ordinal"]
            self._ordinal = int(ordinals[-1]) + 1
            return chunk.with_states(self._states(first, ordinals))
        return None

    def _read(self, limit: int) -> Chunk | None:
        if self._reader is None:
            self._reader = self._source.open(self._split, self._ordinal)
        while True:
            try:
                return self._reader.next_chunk(limit)
            except Exception as error:
                position = get_error_position(error)
                if (
                    position is not None
                    and self._is_deferred(position)
                    and position.element < self._ordinal
                ):
                    continue  # its element is before the restored position
                self._pending_error = error
                return None

    def find_open_error(self) -> Exception | None:
        """Return the error that is the only content of the split, if any; fills the buffer.

        It means that opening a dataset of an interleave failed, and no slot is used.
        """
        self._buffered = self._read(1)
        error = self._pending_error
        position = None if error is None else get_error_position(error)
        if position is None or not position.is_whole_split:
            return None
        assert self._reader is not None
        self._reader.next_chunk(1)  # reads the end of the split
        return error

    def _fill_before_error(self, error: Exception, limit: int) -> Chunk:
        """Return placeholders for elements dropped before an error, or raise the error.

        With deferred errors, return an error of an element in its place.
        """
        position = get_error_position(error)
        before = None if position is None else self._fill_before(position.element, limit)
        if before is not None:
            return before
        self._pending_error = None
        if position is not None and self._is_deferred(position):
            first, self._ordinal = self._ordinal, position.ordinal
            metadata = id_column(
                position.split, np.array([position.element]), self._zero_numbers(1)
            )
            return Chunk.of_rows(
                [DeferredError(error)], self._states(first, metadata["ordinal"]), metadata
            )
        self._num_failed += 1
        raise error

    def _is_deferred(self, position: ErrorPosition) -> bool:
        return self._defers_errors and position.number_at_ordinal == 0

    def _fill_at_end(self, limit: int) -> Chunk | None:
        """Return placeholders for elements dropped at the end of the split."""
        assert self._reader is not None
        placeholders = self._fill_before(self._reader.num_elements, limit)
        self._has_ended = placeholders is None
        return placeholders

    def _fill_before(self, ordinal: int, limit: int) -> Chunk | None:
        """Return placeholders for elements dropped before `ordinal`, or None if there are none."""
        missing = ordinal - self._ordinal
        if not self._fills_gaps or missing <= 0:
            return None
        first, count = self._ordinal, min(missing, limit)
        self._ordinal += count
        metadata = id_column(
            FILTERED_OUT, np.arange(first, self._ordinal), self._zero_numbers(count)
        )
        states = self._states(first, metadata["ordinal"])
        return Chunk.of_rows([None] * count, states, metadata)

    def _zero_numbers(self, count: int) -> IdColumn | None:
        return np.zeros(count, np.uint64) if self._has_element_numbers else None

    def _states(self, first: int, ordinals: Any) -> States:
        """Return the states before elements with these ordinals."""
        failed, size = self._num_failed, len(ordinals)

        def state_at(index: int) -> State:
            return _state(int(ordinals[index - 1]) + 1 if index else first, failed)

        assert size
        return state_at

    def _restore_position(self) -> None:
        """Read up to the restored position, if elements before it had failed."""
        self._is_positioned = True
        ordinal, failed = self._ordinal, self._num_failed
        if not failed:
            return
        self._reader = self._source.open(self._split, 0)
        num_seen = 0
        reached = 0
        while reached < ordinal or num_seen < failed:
            try:
                chunk = self._reader.next_chunk(min(ordinal - reached, _SKIPPED_AT_ONCE) or 1)
            except Exception as error:
                position = get_error_position(error)
                is_deferred = position is not None and self._is_deferred(position)
                # Consecutive failures after the position were not raised yet.
                if (
                    position is not None
                    and position.element >= ordinal
                    and (is_deferred or num_seen == failed)
                ):
                    self._pending_error = error
                    return
                if position is not None and is_deferred:
                    reached = position.ordinal
                    continue
                num_seen += 1
                if num_seen > MAX_FAILURES + failed:
                    raise
                continue
            if chunk is None:
                if self._reader.num_elements >= ordinal:
                    return  # the remaining elements were dropped
                raise DataLossError(
                    f"split {self._split} has {self._reader.num_elements} elements, but "
                    f"{ordinal} were read before the state was saved; restore the state with the "
                    "same data"
                )
            assert chunk.metadata is not None
            ordinals = chunk.metadata["ordinal"]
            start = int(np.searchsorted(ordinals, ordinal))
            reached = int(ordinals[-1]) + 1
            if start < chunk.size:  # elements before it were dropped, or no longer fail
                self._buffered = chunk.slice(start, chunk.size)
                return

    def get_state(self) -> State:
        return _state(self._ordinal, self._num_failed)

    def set_state(self, state: State) -> None:
        # The state of a source in one process, for example, counts elements read, and also has an
        # index.
        if not isinstance(state, dict) or not {"ordinal"} <= state.keys() <= _KEYS:
            raise FailedPreconditionError(MID_SPLIT_STATE_MESSAGE)
        self.close()
        self._ordinal, self._num_failed = state["ordinal"], state.get("failed", 0)
        self._has_ended = self._is_positioned = False

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._buffered = self._pending_error = None
        self._has_ended = True


_KEYS = {"split", "ordinal", "failed"}


def _state(ordinal: int, failed: int) -> State:
    return {"ordinal": ordinal, "failed": failed} if failed else {"ordinal": ordinal}


def _fill_gaps(chunk: Chunk, first_ordinal: int) -> Chunk:
    """Insert placeholders for the elements that were dropped in a chunk.

    Args:
        chunk: The elements.
        first_ordinal: First ordinal to fill.
    """
    assert chunk.metadata is not None
    ordinals = chunk.metadata["ordinal"]
    count = int(ordinals[-1]) + 1 - first_ordinal
    if count == chunk.size:
        return chunk
    offsets = ordinals - first_ordinal
    metadata = np.empty(count, chunk.metadata.dtype)
    metadata["split"] = FILTERED_OUT
    metadata["ordinal"] = np.arange(first_ordinal, first_ordinal + count)
    metadata[offsets] = chunk.metadata
    rows: list[Any] = [None] * count
    for index, row in zip(offsets.tolist(), chunk.rows(), strict=True):
        rows[index] = row
    return Chunk.of_rows(rows, None, metadata)
