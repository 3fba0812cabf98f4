"""Iterators over what a plan begins with: numbers, and elements read by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.structure import flatten
from headrace.errors import FailedPreconditionError
from headrace.execution.context import Context
from headrace.execution.dealt import DealtLeaf
from headrace.execution.intake import Intake
from headrace.execution.iterator import (
    END,
    MOST_FAILURES,
    ElementIterator,
    State,
    make_iterator,
)
from headrace.execution.places import Places, of_positions, within
from headrace.execution.stage import Stage
from headrace.plan.elements import FromSource, Gather, Indices, Read
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, IndexedSource, Position, Reader, Source
from headrace.plan.traverse import cardinality

__all__ = ["GatherIterator", "IndexPart", "IndicesIterator", "ReadIterator", "RowsIterator"]


@make_iterator.register(Indices)
class IndicesIterator(ElementIterator):
    """Counts from the first; its state is how many were counted."""

    def __init__(self, node: Indices, context: Context) -> None:
        self._wants_places = context.wants_places
        self._first = node.start
        self._size = node.size
        self._next = 0

    def next_chunk(self, limit: int) -> Chunk | None:
        start = self._next
        stop = start + limit if self._size == INFINITE else min(start + limit, self._size)
        if stop <= start:
            return None
        self._next = stop
        numbers = np.arange(self._first + start, self._first + stop)
        places = of_positions(start, stop - start) if self._wants_places else None
        return Chunk.of_columns(numbers, stop - start, start.__add__, places)

    def get_state(self) -> State:
        return self._next

    def set_state(self, state: State) -> None:
        self._next = state

    def skip(self, count: int) -> int:
        if self._size != INFINITE:
            count = max(0, min(count, self._size - self._next))
        self._next += count
        return count

    def seek(self, position: int) -> None:
        self._next = position


class IndexPart(ElementIterator):
    """A whole index part of a plan: its state is the number of elements that were passed.

    The steps inside only have to read and to seek.
    """

    def __init__(self, node: Node, context: Context) -> None:
        self._node = node
        self._wants_places = context.wants_places
        # Which of its positions an element has is known here alone.
        self._steps = make_iterator(node, context.with_places(False))
        self._position = 0
        #: Whether the steps are at `_position`. They seek before the first read, so that a step
        #: that leaves elements out does not read them.
        self._is_there = False

    def next_chunk(self, limit: int) -> Chunk | None:
        start = self._position
        if not self._is_there:
            self._steps.seek(start)
            self._is_there = True
        chunk = self._steps.next_chunk(limit)
        if chunk is None:
            return None
        self._position = start + chunk.size
        if self._wants_places:
            chunk = chunk.with_places(of_positions(start, chunk.size))
        return chunk.with_states(start.__add__)

    def get_state(self) -> State:
        return self._position

    def set_state(self, state: State) -> None:
        self._position = state
        self._is_there = False

    def seek(self, position: int) -> None:
        self.set_state(position)

    def skip(self, count: int) -> int:
        size = cardinality(self._node)
        count = count if size == INFINITE else max(0, min(count, size - self._position))
        self.set_state(self._position + count)
        return count

    def close(self) -> None:
        self._steps.close()


def _index_part(node: Node, context: Context) -> ElementIterator:
    if context.dealer is not None:
        return DealtLeaf(node, context)
    if isinstance(node, Indices):  # each number is its own position
        return make_iterator(node, context)
    return IndexPart(node, context)


@make_iterator.register(Gather)
def _make_gather(node: Gather, context: Context) -> ElementIterator:
    if context.dealer is None and isinstance(node.input, Indices) and not context.is_watched:
        return RowsIterator(node.source, node.input, context.wants_places)
    return GatherIterator(node, context)


class RowsIterator(ElementIterator):
    """Fetches the elements of a source in order: a `Gather` over numbers, and most datasets.

    The state is that of the numbers: how many elements were passed.
    """

    def __init__(self, source: IndexedSource, indices: Indices, wants_places: bool) -> None:
        self._source = source
        self._wants_places = wants_places
        self._first = indices.start
        self._size = indices.size
        self._next = 0
        #: Elements before this one could not be fetched together.
        self._one_by_one = 0

    @property
    def reads_ahead_freely(self) -> bool:
        return not self._source.runs_user_code

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            start, size = self._next, self._size
            stop = start + (1 if start < self._one_by_one else limit)
            if stop > size >= 0:
                stop = size
            if stop <= start:
                return None
            first = self._first
            try:
                columns = self._source.gather(np.arange(first + start, first + stop))
            except Exception:
                if stop - start > 1:
                    self._one_by_one = stop
                    continue
                self._next = stop
                raise
            self._next = stop
            places = of_positions(start, stop - start) if self._wants_places else None
            return Chunk.of_columns(columns, stop - start, start.__add__, places)

    def get_state(self) -> State:
        return self._next

    def set_state(self, state: State) -> None:
        self._next = state

    def skip(self, count: int) -> int:
        if self._size != INFINITE:
            count = max(0, min(count, self._size - self._next))
        self._next += count
        return count


class GatherIterator(Stage):
    """Fetches the elements at the indices of its input, a chunk at once."""

    def __init__(self, node: Gather, context: Context) -> None:
        super().__init__(_index_part(node.input, context))
        self._source = node.source
        self._is_free = not node.source.runs_user_code

    @property
    def reads_ahead_freely(self) -> bool:
        return self._is_free

    def _work(self, limit: int) -> Chunk | None:
        while True:
            chunk = self._intake.look(limit)
            if chunk is None:
                return None
            start = self._intake.offset
            part = chunk.slice(start, start + (1 if chunk is self._one_by_one else limit))
            try:
                made = self._gather(part)
            except Exception as error:
                if part.size == 1:
                    self._failure = error
                    return None
                self._one_by_one = chunk
                continue
            self._intake.use(part.size)
            return made

    def _gather(self, chunk: Chunk) -> Chunk:
        if not chunk.is_columnar:
            rows = chunk.rows()
            leaves, _ = flatten(rows[0])
            if any(isinstance(leaf, np.ndarray) for leaf in leaves):  # batches of any size
                made = [self._source.gather(row) for row in rows]
                return Chunk.of_rows(made, chunk.states, chunk.places)
        made = self._source.gather(chunk.columns())
        return Chunk.of_columns(made, chunk.size, chunk.states, chunk.places)

    def skip(self, count: int) -> int:
        self._failure = None
        return self._intake.skip(count)


class ReadIterator(ElementIterator):
    """Reads what a source holds at the indices of its input, index by index.

    The state is the place of the index, how many of its elements were passed, how many errors
    were raised between them if any were (`failed`), and a hint that only saves time: a position
    of the reader, and how many elements were passed since.
    """

    def __init__(self, source: Source, indices: ElementIterator, open_: _Open) -> None:
        self.gives_rows = source.runs_user_code
        self._open = open_
        self._refusal = source.cannot_restore
        self._intake = Intake(indices)
        self._reader: Reader | None = None
        self._read_row: Callable[[], Any] | None = None  # of the reader, if it has one
        self._place: State = None  # of the index that the reader reads
        self._number: Places | None = None  # of that place, if it is asked for
        self._ordinal = 0  # elements of it that were passed
        self._failed = 0  # errors of it that were raised
        self._has_positions = True  # those of the reader tell where it goes on
        self._pending: dict[str, Any] | None = None  # a state to go to before the next read
        #: The places of the elements from number `_known_from` on; None: not known.
        self._known: States | None = None
        self._known_from = 0

    @property
    def reads_ahead_freely(self) -> bool:
        return not self.gives_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            reader = self._reader or self._next_reader()
            if reader is None:
                return None
            position, ordinal = reader.get_position(), self._ordinal
            try:
                chunk = reader.read(limit)
            except Exception:
                self._count_error(reader, position)
                raise
            if chunk is not None:
                self._ordinal = ordinal + chunk.size
                self._known = None  # a reader may have forgotten how to go back so far
                if self._number is not None:
                    ordinals = np.arange(ordinal, self._ordinal, dtype=np.uint64)
                    chunk = chunk.with_places(within(self._number, ordinals))
                return chunk.with_states(self._places(reader, position, ordinal, chunk.size))
            self._close_reader()

    def next_row(self) -> Any:
        while True:
            read_row = self._read_row
            if read_row is None:
                if (self._reader or self._next_reader()) is None:
                    return END
                if self._read_row is None:
                    return super().next_row()
                continue
            try:
                row = read_row()
            except StopIteration:
                self._close_reader()
                continue
            except Exception:
                # The readers of user code count elements, and stay where they fail.
                assert self._reader is not None
                self._count_error(self._reader, self._reader.get_position())
                raise
            self._ordinal += 1
            return row

    def place(self) -> tuple[States, int]:
        known, index = self._known, self._ordinal - self._known_from
        if known is None or index >= _MOST_PASSED_OVER:
            if self._reader is None:
                return super().place()
            self._known_from, index = self._ordinal, 0
            known = self._places(self._reader, self._reader.get_position(), self._ordinal, -1)
            self._known = known
        return known, index

    def _count_error(self, reader: Reader, before: Position) -> None:
        self._failed += 1
        self._known = None
        if reader.get_position() == before:
            self._has_positions = False  # from there it would fail again

    def _places(self, reader: Reader, before: Position, ordinal: int, size: int) -> States:
        """Return the places of `size` elements that a reader gave from position `before` on.

        -1: of those that it gives next, however many.
        """
        if not self._has_positions:
            place, failed = self._place, self._failed
            return lambda index: _state(place, ordinal + index, failed)
        return _hinted(self._place, ordinal, self._failed, before, size, reader.get_position())

    def _next_reader(self) -> Reader | None:
        """Open the next index, or go to the state that was set; None: there are no more."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._intake.set_state(pending["index"])
        index = self._intake.take(1)
        if index is None:
            return None
        self._place, self._ordinal, self._failed = index.state_at(0), 0, 0
        self._number = index.places
        self._has_positions, self._known = True, None
        (number,) = index.rows()
        if pending is not None:
            self._ordinal, self._failed = pending["ordinal"], pending.get("failed", 0)
        self._reader = self._open_at(int(number), pending or {})
        self._read_row = getattr(self._reader, "read_row", None)
        return self._reader

    def _open_at(self, number: int, state: dict[str, Any]) -> Reader:
        """Open an index where its reader stood in this state."""
        ordinal, failed = self._ordinal, self._failed
        if not ordinal and not failed:
            return self._open(number, None)
        if "hint" in state:
            position, since = state["hint"]
            reader = self._open(number, position)
            _pass_over(reader, since)
            return reader
        reader = self._open(number, None)
        self._has_positions = not failed
        if not _pass_over(reader, ordinal, failed):
            # What failed does not any more, and the element after it was read.
            reader.close()
            reader = self._open(number, None)
            _pass_over(reader, ordinal)
        return reader

    def get_state(self) -> State:
        if self._pending is not None:
            return self._pending
        if self._reader is None:
            return {"index": self._intake.get_state(), "ordinal": 0}
        return self._places(self._reader, self._reader.get_position(), self._ordinal, 0)(0)

    def set_state(self, state: State) -> None:
        if self._refusal and state["ordinal"]:
            raise FailedPreconditionError(self._refusal)
        self._close_reader()
        self._pending = state

    def close(self) -> None:
        self._close_reader()
        self._intake.close()

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        self._read_row = self._known = None
        if reader is not None:
            reader.close()


_Open: TypeAlias = Callable[[int, Position], Reader]

_MOST_PASSED_OVER = 1024
"""Elements that may lie between the position of a reader that is remembered and a place."""


@make_iterator.register(Read)
def _make_read(node: Read, context: Context) -> ElementIterator:
    source, passes = node.source, context.passes

    def open_(index: int, position: Position) -> Reader:
        return source.open(index, index + 1, position, pass_number=passes)

    return ReadIterator(source, _index_part(node.input, context), open_)


@make_iterator.register(FromSource)
def _make_source(node: FromSource, context: Context) -> ElementIterator:
    """Read a source that cannot be read in parts: as if it had one index."""
    source, passes = node.source, context.passes

    def open_(index: int, position: Position) -> Reader:
        return source.open(0, source.size, position, pass_number=passes)

    return ReadIterator(source, IndicesIterator(Indices(size=1), context), open_)


def _hinted(
    place: State, ordinal: int, failed: int, before: Position, size: int, after: Position
) -> States:
    """Return the places of `size` elements that a reader gave, and its positions around them."""

    def states(index: int) -> State:
        state = _state(place, ordinal + index, failed)
        state["hint"] = [after, 0] if index == size else [before, index]
        return state

    return states


def _state(place: State, ordinal: int, failed: int) -> dict[str, Any]:
    state = {"index": place, "ordinal": ordinal}
    if failed:
        state["failed"] = failed
    return state


def _pass_over(reader: Reader, count: int, failures: int = 0) -> bool:
    """Read past elements and errors; say whether there were as many errors.

    Elements that fail count as none, as when they were passed before.
    """
    failed = 0
    while count or failed < failures:
        try:
            chunk = reader.read(count or 1)
        except Exception:
            failed += 1
            if failed > MOST_FAILURES + failures:
                raise
            continue
        if chunk is None:
            return True
        if not count:
            return False
        count -= chunk.size
    return True
