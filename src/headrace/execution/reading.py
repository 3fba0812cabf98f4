"""Iterator over sources that are read sequentially: files, generators and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.execution.context import Context
from headrace.execution.element_numbers import IdColumn, nest_ids
from headrace.execution.elements import IndicesIterator, build_index_iterator
from headrace.execution.input_buffer import InputBuffer
from headrace.execution.iterator import (
    MAX_FAILURES,
    ElementIterator,
    LazyRows,
    State,
    make_iterator,
)
from headrace.plan.elements import FromSource, Indices, ReadIndices
from headrace.plan.source import Position, Reader
from headrace.plan.user_function import step_name

__all__ = ["ReadIterator"]


class ReadIterator(ElementIterator):
    """Reads the elements of a source at the indices of its input, index by index.

    The state consists of the state of the indices, the number of elements read of the current
    index, the number of errors raised among them, if any (`failed`), and a hint that only saves
    time: a position of the reader, and the number of elements read since.
    """

    def __init__(
        self, node: ReadIndices | FromSource, indices: ElementIterator, open_: _Open
    ) -> None:
        source = node.source
        self.has_lazy_rows: bool = source.runs_user_code
        self.is_small: bool = source.is_small
        self._open = open_
        self._node = node
        self._restore_obstacle = source.restore_obstacle
        self._input_buffer = InputBuffer(indices)
        self._reader: Reader | None = None
        self._rows: Iterator[Any] | None = None  # rows of the reader, one by one
        self._index_state: State = None  # state before the current index
        self._index_id: IdColumn | None = None  # metadata of the index, if wanted
        self._ordinal = 0  # elements read of the current index
        self._num_failed = 0  # errors raised in the current index
        self._has_positions = True  # whether the reader's positions are usable in states
        self._pending: dict[str, Any] | None = None  # a state to restore before the next read

    @property
    def can_read_ahead(self) -> bool:
        return not self.has_lazy_rows

    @property
    def available_elements(self) -> int:
        return getattr(self._reader, "available_elements", 0)

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            reader = self._reader or self._next_reader()
            if reader is None:
                return None
            self._rows = None
            position, ordinal = reader.get_position(), self._ordinal
            try:
                chunk = reader.read(limit)
            except Exception:
                self._count_error(reader, position)
                raise
            if chunk is not None:
                self._ordinal = ordinal + chunk.size
                if self._index_id is not None:
                    ordinals = np.arange(ordinal, self._ordinal, dtype=np.uint64)
                    chunk = chunk.with_metadata(nest_ids(self._index_id, ordinals))
                if chunk.has_states:  # the reader knows its positions within the chunk
                    index_state, failed = self._index_state, self._num_failed
                    return chunk.with_states(
                        _states_with_positions(index_state, ordinal, failed, chunk.states)
                    )
                return chunk.with_states(self._states(reader, position, ordinal, chunk.size))
            self._close_reader()

    def lazy_rows(self) -> LazyRows | None:
        reader = self._reader or self._next_reader()
        if reader is None:
            return None
        rows = self._rows
        if rows is None:
            if not hasattr(reader, "rows"):
                return super().lazy_rows()
            rows = self._rows = reader.rows()
        # A reader may not be able to go back over more rows.
        states = self._states(reader, reader.get_position(), self._ordinal, -1)
        return self._yield_rows(reader, rows), states

    def _yield_rows(self, reader: Reader, rows: Iterator[Any]) -> Iterator[Any]:
        count = 0
        try:
            for count, row in zip(_ROWS_AT_ONCE, rows, strict=False):  # noqa: B007 - used below
                yield row
        except Exception:
            self._rows = None
            self._ordinal += count
            self._count_error(reader, None)  # the reader's position is after the failed element
            raise
        self._ordinal += count
        if count < _ROWS_AT_ONCE[-1]:
            self._close_reader()

    def _count_error(self, reader: Reader, before: Position) -> None:
        self._num_failed += 1
        # Reading from there would fail again. A remote ordered source has positions despite errors.
        if reader.get_position() == before and not self._node.source.has_ordered_partition:
            self._has_positions = False

    def _states(self, reader: Reader, before: Position, ordinal: int, size: int) -> States:
        """Return the states before the elements that a reader returned from position `before` on.

        A `size` of -1 stands for any number of next elements.
        """
        if not self._has_positions:
            index_state, failed = self._index_state, self._num_failed
            return lambda index: _state(index_state, ordinal + index, failed)
        return _states_with_hints(
            self._index_state, ordinal, self._num_failed, before, size, reader.get_position()
        )

    def _next_reader(self) -> Reader | None:
        """Open the next index, or restore the pending state; return None at the end."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._input_buffer.set_state(pending["index"])
        chunk = self._input_buffer.take(1)
        if chunk is None:
            return None
        self._index_state, self._ordinal, self._num_failed = chunk.state_at(0), 0, 0
        self._index_id = chunk.metadata
        self._has_positions = True
        (index,) = chunk.rows()
        if pending is not None:
            self._ordinal, self._num_failed = pending["ordinal"], pending.get("failed", 0)
        self._reader = self._open_at(int(index), pending or {})
        return self._reader

    def _open_at(self, index: int, state: dict[str, Any]) -> Reader:
        """Open an index at the position of its reader in a state."""
        ordinal, failed = self._ordinal, self._num_failed
        if not ordinal and not failed:
            return self._open(index, None)
        if "hint" in state:
            position, since = state["hint"]
            reader = self._open(index, position)
            self._skip_elements(reader, index, since)
            return reader
        reader = self._open(index, None)
        self._has_positions = not failed
        if not self._skip_elements(reader, index, ordinal, failed):
            # The element that failed before no longer fails, and the element after it was read.
            reader.close()
            reader = self._open(index, None)
            self._skip_elements(reader, index, ordinal)
        return reader

    def _skip_elements(self, reader: Reader, index: int, count: int, failures: int = 0) -> bool:
        """Skip elements and errors of an index; return whether `failures` errors occurred.

        Failed elements are not counted, as when they were first read.

        Raises:
            DataLossError: If there are fewer elements than were read before.
        """
        failed, failure = 0, None
        while count or failed < failures:
            try:
                chunk = reader.read(min(count, _MAX_SKIPPED_AT_ONCE) or 1)
            except Exception as error:
                failed, failure = failed + 1, error
                if failed > MAX_FAILURES + failures:
                    raise
                continue
            if chunk is None:
                if not count:
                    return True
                reader.close()
                if isinstance(failure, DataLossError):
                    raise failure  # the reader's error is more specific
                raise self._too_short(index, self._ordinal - count) from failure
            if not count:
                return False
            count -= chunk.size
        return True

    def _too_short(self, index: int, num_found: int) -> DataLossError:
        source = self._node.source
        name = f"index {index} of {step_name(self._node, type(source).__name__)}"
        if source.index_kind == "file" and index < len(source.paths):
            name = repr(source.paths[index])
        return DataLossError(
            f"{name} has {num_found} elements, but {self._ordinal} were read before the state was "
            "saved; restore the state with the same data"
        )

    def get_state(self) -> State:
        if self._pending is not None:
            return self._pending
        if self._reader is None:
            return {"index": self._input_buffer.get_state(), "ordinal": 0}
        return self._states(self._reader, self._reader.get_position(), self._ordinal, 0)(0)

    def set_state(self, state: State) -> None:
        if self._restore_obstacle and state["ordinal"]:
            raise FailedPreconditionError(self._restore_obstacle)
        self._close_reader()
        self._pending = state

    def close(self) -> None:
        self._close_reader()
        self._input_buffer.close()

    def _close_reader(self) -> None:
        # Closed before the reference is dropped: after an interruption in between it is closed
        # again, and a data service reader resumes where it was only if it was closed.
        if self._reader is not None:
            self._reader.close()
        self._reader = self._rows = None


_Open: TypeAlias = Callable[[int, Position], Reader]

_ROWS_AT_ONCE = range(1, 1025)
"""Counts of rows yielded at once: the distance of a state from the reader's last position."""


@make_iterator.register(ReadIndices)
def _make_read(node: ReadIndices, context: Context) -> ElementIterator:
    source, epochs = node.source, context.epochs

    def open_(index: int, position: Position) -> Reader:
        return source.open(index, index + 1, position, pass_number=epochs)

    return ReadIterator(node, build_index_iterator(node.input, context), open_)


@make_iterator.register(FromSource)
def _make_source(node: FromSource, context: Context) -> ElementIterator:
    """Read a source that cannot be read in parts, as if it had one index."""
    source = node.source.with_seed(context.seed)

    def open_(index: int, position: Position) -> Reader:
        return source.open(0, source.size, position, pass_number=context.source_epochs(source))

    return ReadIterator(node, IndicesIterator(Indices(size=1), context), open_)


_MAX_SKIPPED_AT_ONCE = 16
"""Number of elements to read at once while skipping; each may be large."""


def _states_with_hints(
    index_state: State, ordinal: int, failed: int, before: Position, size: int, after: Position
) -> States:
    """Return the states before a reader's elements, with the reader's positions around them."""

    def states(index: int) -> State:
        state = _state(index_state, ordinal + index, failed)
        state["hint"] = [after, 0] if index == size else [before, index]
        return state

    return states


def _states_with_positions(
    index_state: State, ordinal: int, failed: int, positions: States
) -> States:
    """Return the states before elements whose positions the reader returned."""

    def states(index: int) -> State:
        return {**_state(index_state, ordinal + index, failed), "hint": [positions(index), 0]}

    return states


def _state(index_state: State, ordinal: int, failed: int) -> dict[str, Any]:
    state = {"index": index_state, "ordinal": ordinal}
    if failed:
        state["failed"] = failed
    return state
