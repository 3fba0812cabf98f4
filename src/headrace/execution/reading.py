"""The iterator over what sources hold at indices: files, generators, whatever is read in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.errors import DataLossError, FailedPreconditionError
from headrace.execution.context import Context
from headrace.execution.elements import IndicesIterator, index_part_iterator
from headrace.execution.intake import Intake
from headrace.execution.iterator import (
    MOST_FAILURES,
    ElementIterator,
    Singles,
    State,
    make_iterator,
)
from headrace.execution.places import Places, within
from headrace.plan.elements import FromSource, Indices, Read
from headrace.plan.source import Position, Reader
from headrace.plan.user_function import step_name

__all__ = ["ReadIterator"]


class ReadIterator(ElementIterator):
    """Reads what a source holds at the indices of its input, index by index.

    The state is that of the indices, how many of its elements were passed, how many errors
    were raised between them if any were (`failed`), and a hint that only saves time: a position
    of the reader, and how many elements were passed since.
    """

    def __init__(self, node: Read | FromSource, indices: ElementIterator, open_: _Open) -> None:
        source = node.source
        self.gives_rows = source.runs_user_code
        self._open = open_
        self._node = node
        self._refusal = source.cannot_restore
        self._intake = Intake(indices)
        self._reader: Reader | None = None
        self._rows: Iterator[Any] | None = None  # those of the reader, one by one
        self._index_state: State = None  # of the index that the reader reads
        self._index_place: Places | None = None  # of the index, if it is asked for
        self._ordinal = 0  # elements of it that were passed
        self._failed = 0  # errors of it that were raised
        self._has_positions = True  # those of the reader tell where it goes on
        self._pending: dict[str, Any] | None = None  # a state to go to before the next read

    @property
    def reads_ahead_freely(self) -> bool:
        return not self.gives_rows

    @property
    def arrived(self) -> int:
        return getattr(self._reader, "arrived", 0)

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
                if self._index_place is not None:
                    ordinals = np.arange(ordinal, self._ordinal, dtype=np.uint64)
                    chunk = chunk.with_places(within(self._index_place, ordinals))
                if chunk.has_states:  # the reader knows where it stands within the chunk
                    at, failed = self._index_state, self._failed
                    return chunk.with_states(_located(at, ordinal, failed, chunk.states))
                return chunk.with_states(self._states(reader, position, ordinal, chunk.size))
            self._close_reader()

    def singles(self) -> Singles | None:
        reader = self._reader or self._next_reader()
        if reader is None:
            return None
        rows = self._rows
        if rows is None:
            if not hasattr(reader, "rows"):
                return super().singles()
            rows = self._rows = reader.rows()
        # A reader may have forgotten how to go back over more.
        states = self._states(reader, reader.get_position(), self._ordinal, -1)
        return self._read_on(reader, rows), states

    def _read_on(self, reader: Reader, rows: Iterator[Any]) -> Iterator[Any]:
        count = 0
        try:
            for count, row in zip(_PASSED_OVER, rows, strict=False):  # noqa: B007 - read after it
                yield row
        except Exception:
            self._rows = None
            self._ordinal += count
            self._count_error(reader, None)  # its position is after what failed
            raise
        self._ordinal += count
        if count < _PASSED_OVER[-1]:
            self._close_reader()

    def _count_error(self, reader: Reader, before: Position) -> None:
        self._failed += 1
        # From there it would fail again. What is read elsewhere has its place, whatever failed.
        if reader.get_position() == before and not self._node.source.has_halves:
            self._has_positions = False

    def _states(self, reader: Reader, before: Position, ordinal: int, size: int) -> States:
        """Return the states before `size` elements that a reader gave from position `before` on.

        -1: of those that it gives next, however many.
        """
        if not self._has_positions:
            at, failed = self._index_state, self._failed
            return lambda index: _state(at, ordinal + index, failed)
        return _hinted(
            self._index_state, ordinal, self._failed, before, size, reader.get_position()
        )

    def _next_reader(self) -> Reader | None:
        """Open the next index, or go to the state that was set; None: there are no more."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._intake.set_state(pending["index"])
        index = self._intake.take(1)
        if index is None:
            return None
        self._index_state, self._ordinal, self._failed = index.state_at(0), 0, 0
        self._index_place = index.places
        self._has_positions = True
        (number,) = index.rows()
        if pending is not None:
            self._ordinal, self._failed = pending["ordinal"], pending.get("failed", 0)
        self._reader = self._open_at(int(number), pending or {})
        return self._reader

    def _open_at(self, number: int, state: dict[str, Any]) -> Reader:
        """Open an index where its reader stood in this state."""
        ordinal, failed = self._ordinal, self._failed
        if not ordinal and not failed:
            return self._open(number, None)
        if "hint" in state:
            position, since = state["hint"]
            reader = self._open(number, position)
            self._pass_over(reader, number, since)
            return reader
        reader = self._open(number, None)
        self._has_positions = not failed
        if not self._pass_over(reader, number, ordinal, failed):
            # What failed does not any more, and the element after it was read.
            reader.close()
            reader = self._open(number, None)
            self._pass_over(reader, number, ordinal)
        return reader

    def _pass_over(self, reader: Reader, number: int, count: int, failures: int = 0) -> bool:
        """Read past elements and errors of an index; say whether there were as many errors.

        Elements that fail count as none, as when they were passed before.

        Raises:
            DataLossError: There are fewer elements than were passed before.
        """
        failed, failure = 0, None
        while count or failed < failures:
            try:
                chunk = reader.read(min(count, _MOST_AT_ONCE) or 1)
            except Exception as error:
                failed, failure = failed + 1, error
                if failed > MOST_FAILURES + failures:
                    raise
                continue
            if chunk is None:
                if not count:
                    return True
                reader.close()
                if isinstance(failure, DataLossError):
                    raise failure  # the reader knows more of it
                raise self._too_short(number, self._ordinal - count) from failure
            if not count:
                return False
            count -= chunk.size
        return True

    def _too_short(self, number: int, found: int) -> DataLossError:
        source = self._node.source
        name = f"index {number} of {step_name(self._node, type(source).__name__)}"
        if source.index_holds == "file" and number < len(source.paths):
            name = repr(source.paths[number])
        return DataLossError(
            f"{name} has {found} elements, but {self._ordinal} were read before the state was "
            "saved; restore it with the same data"
        )

    def get_state(self) -> State:
        if self._pending is not None:
            return self._pending
        if self._reader is None:
            return {"index": self._intake.get_state(), "ordinal": 0}
        return self._states(self._reader, self._reader.get_position(), self._ordinal, 0)(0)

    def set_state(self, state: State) -> None:
        if self._refusal and state["ordinal"]:
            raise FailedPreconditionError(self._refusal)
        self._close_reader()
        self._pending = state

    def close(self) -> None:
        self._close_reader()
        self._intake.close()

    def _close_reader(self) -> None:
        # Closed before it is let go of: an interruption in between closes it once more, and one of
        # the service goes on where it was only if it was closed.
        if self._reader is not None:
            self._reader.close()
        self._reader = self._rows = None


_Open: TypeAlias = Callable[[int, Position], Reader]

_PASSED_OVER = range(1, 1025)
"""Elements that may lie between the position of a reader that is remembered and a place."""


@make_iterator.register(Read)
def _make_read(node: Read, context: Context) -> ElementIterator:
    source, passes = node.source, context.passes

    def open_(index: int, position: Position) -> Reader:
        return source.open(index, index + 1, position, pass_number=passes)

    return ReadIterator(node, index_part_iterator(node.input, context), open_)


@make_iterator.register(FromSource)
def _make_source(node: FromSource, context: Context) -> ElementIterator:
    """Read a source that cannot be read in parts: as if it had one index."""
    source = node.source.seeded(context.seed)

    def open_(index: int, position: Position) -> Reader:
        return source.open(0, source.size, position, pass_number=context.pass_over(source))

    return ReadIterator(node, IndicesIterator(Indices(size=1), context), open_)


_MOST_AT_ONCE = 16
"""Elements that are read together to be passed over: each may be large."""


def _hinted(
    at: State, ordinal: int, failed: int, before: Position, size: int, after: Position
) -> States:
    """Return the states before elements that a reader gave, with its positions around them."""

    def states(index: int) -> State:
        state = _state(at, ordinal + index, failed)
        state["hint"] = [after, 0] if index == size else [before, index]
        return state

    return states


def _located(at: State, ordinal: int, failed: int, positions: States) -> States:
    """Return the states before elements of which a reader told the positions."""

    def states(index: int) -> State:
        return {**_state(at, ordinal + index, failed), "hint": [positions(index), 0]}

    return states


def _state(at: State, ordinal: int, failed: int) -> dict[str, Any]:
    state = {"index": at, "ordinal": ordinal}
    if failed:
        state["failed"] = failed
    return state
