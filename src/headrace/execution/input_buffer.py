"""Input of a step, read in exact amounts, with an adaptive number of elements per read."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from headrace.element.chunk import Chunk, States
from headrace.element.wire import frame_bytes
from headrace.execution.iterator import ElementIterator, State
from headrace.malloc_tuning import keep_freed_memory

__all__ = [
    "ChunkSizer",
    "InputBuffer",
    "LazyRowStream",
]

# --- Adaptive read sizes --------------------------------------------------------------------------
#
# Large reads amortize the cost of a call; small reads return the first element soon and hold little
# memory. So a step that reads ahead starts with one element, and doubles the number each time a
# read took less than `_FAST_SECONDS`.
#
# An input that cannot read ahead freely computes everything requested, however long the user's
# function takes: limit its reads with `max_elements`.

_FAST_SECONDS = 0.0005
_SLOW_SECONDS = 0.005
_MAX_CONSUMER_SECONDS = 0.1
_SMALL_SIZE = 512  # of an input with `is_small`

# Chunks and batches are freed and allocated often; keep twice this much memory for them.
keep_freed_memory(16 << 20)


class ChunkSizer:
    """Reads chunks sized to arrive in about a millisecond.

    Args:
        max_elements: Maximum number of elements per read.
        max_bytes: Maximum size of a chunk; larger chunks exceed the processor's cache and gain
            nothing.
        min_elements: Minimum and initial number of elements.
    """

    __slots__ = ("_last_read_time", "_max_bytes", "_max_elements", "_min_elements", "limit")

    def __init__(
        self, max_elements: int = 1024, max_bytes: int = 1 << 19, min_elements: int = 1
    ) -> None:
        self._min_elements = min_elements
        self._max_elements = max(max_elements, min_elements)
        self._max_bytes = max_bytes
        self._last_read_time = -math.inf
        self.limit: int = min_elements

    def next_chunk(self, iterator: ElementIterator, min_elements: int = 1) -> Chunk | None:
        """Return the iterator's next chunk, including elements that have already arrived.

        A consumer that is slow gets small chunks, because a reader checks before each chunk whether
        its element lease is still valid.
        """
        if time.perf_counter() - self._last_read_time < _MAX_CONSUMER_SECONDS:
            min_elements = max(min_elements, min(iterator.available_elements, self._max_elements))
        return self.read_chunk(iterator, min_elements)

    def read_chunk(self, iterator: ElementIterator, min_elements: int) -> Chunk | None:
        """Return the iterator's next chunk, asking for at least `min_elements` elements."""
        limit = self.limit
        if limit < min_elements:
            limit = min_elements
        start = time.perf_counter()
        chunk = iterator.next_chunk(limit)
        self._last_read_time = time.perf_counter()
        seconds = self._last_read_time - start
        if chunk is None:
            return None
        if seconds > _SLOW_SECONDS:
            self.limit = max(self._min_elements, min(limit, self._max_elements) // 2)
        elif seconds < _FAST_SECONDS and self.limit < self._max_elements:
            # Decide by time alone: a filter returns fewer elements than requested.
            affordable = self._max_bytes * chunk.size // (frame_bytes(chunk) + 1)
            self.limit = max(
                self._min_elements, min(self.limit * 2, self._max_elements, affordable)
            )
        return chunk


# --- InputBuffer: reads in exact amounts and knows each element's position ------------------------
#
# A step that takes an exact number of elements, or is interrupted by an error, leaves elements that
# its input has returned. The buffer holds them. The buffered chunk knows the state before each of
# its elements, so the buffer needs no other position.


class LazyRowStream:
    """Single elements of an input, each made when it is taken from `rows`.

    The consumer updates `num_taken` before any other code reads it.
    """

    __slots__ = ("_all_rows", "_states", "num_taken", "rows")

    def __init__(self, rows: Iterator[Any], states: States, num_taken: int = 0) -> None:
        self.rows = self._all_rows = rows
        self._states = states
        self.num_taken: int = num_taken

    def put_back(self, row: Any) -> None:
        """Return the last element to the stream, so that it comes next again."""
        self.rows = chain((row,), self._all_rows)

    @property
    def states(self) -> States:
        """States before the elements that come next."""
        states, taken = self._states, self.num_taken
        return (lambda index: states(taken + index)) if taken else states


class InputBuffer:
    """Reads an input iterator in exact amounts.

    There are three ways to read. `take` returns elements. `peek` leaves them in the buffer, for a
    step that does not know in advance how many it will use; the step calls `consume` for those.
    `lazy_rows` returns elements that are not made yet; the caller calls `end_lazy_rows` after the
    last of them or an error.
    """

    __slots__ = ("_chunk_sizer", "_lazy_rows", "chunk", "input", "offset")

    _chunk_sizer: ChunkSizer | None
    _lazy_rows: LazyRowStream | None

    chunk: Chunk | None
    """Buffered chunk: elements before `offset` are consumed, and at least one is not."""
    offset: int

    def __init__(self, input_: ElementIterator) -> None:
        self.input: ElementIterator = input_
        self.chunk = None
        self.offset = 0
        self._chunk_sizer = None
        self._lazy_rows = None

    @property
    def num_buffered(self) -> int:
        """Number of elements that can be taken without reading the input."""
        return 0 if self.chunk is None else self.chunk.size - self.offset

    @property
    def states(self) -> States | None:
        """States before the buffered elements or lazy rows, or None at the input's position."""
        chunk, offset = self.chunk, self.offset
        if chunk is not None:
            states = chunk.states
            return (lambda index: states(offset + index)) if offset else states
        return None if self._lazy_rows is None else self._lazy_rows.states

    def take(self, count: int, *, are_needed: bool = False) -> Chunk | None:
        """Return 1 to `count` elements, or None at the end; read at most `count`.

        Args:
            count: Maximum number of elements.
            are_needed: Whether the step needs all of them (`ElementIterator.next_needed_chunk`).
        """
        chunk, offset = self.chunk, self.offset
        if chunk is None:
            chunk = self._next_chunk(count, are_needed)
            if chunk is None or chunk.size <= count:
                return chunk
            offset = 0
        end = offset + count
        if end >= chunk.size:
            self.chunk = None
            return chunk.slice(offset, chunk.size)
        self.chunk, self.offset = chunk, end
        return chunk.slice(offset, end)

    def peek(self, count: int) -> Chunk | None:
        """Return the buffered chunk; if there is none, read the next 1 to `count` elements."""
        if self.chunk is None:
            self.chunk = self._next_chunk(count)
            self.offset = 0
        return self.chunk

    def peek_ahead(self, count: int) -> Chunk | None:
        """Return the buffered chunk, or read `count` elements or more, if reading ahead is free."""
        if self.chunk is not None:
            return self.chunk
        if self._lazy_rows is not None or not self.input.can_read_ahead:
            return self.peek(max(count, self.input.preferred_limit))
        if self._chunk_sizer is None:
            self._chunk_sizer = ChunkSizer()
            if self.input.is_small:
                count = max(count, _SMALL_SIZE)
        self.chunk = self._chunk_sizer.next_chunk(self.input, count)
        self.offset = 0
        return self.chunk

    def _next_chunk(self, count: int, are_needed: bool = False) -> Chunk | None:
        stream = self._lazy_rows
        if stream is not None:
            states = stream.states
            try:
                for row in stream.rows:
                    stream.num_taken += 1
                    return Chunk.of_rows([row], states)
            except Exception:
                self._lazy_rows = None
                raise
            self._lazy_rows = None
        input_ = self.input
        return input_.next_needed_chunk(count) if are_needed else input_.next_chunk(count)

    def lazy_rows(self) -> LazyRowStream | None:
        """Return the next elements as a stream of lazy rows, or None at the end."""
        stream, chunk = self._lazy_rows, self.chunk
        if stream is None and chunk is None and self.input.has_lazy_rows:
            rows_and_states = self.input.lazy_rows()
            if rows_and_states is None:
                return None
            stream = LazyRowStream(*rows_and_states)
        elif stream is None or chunk is not None:
            chunk = self.peek_ahead(1)
            if chunk is None:
                return None
            rows = iter(chunk.rows()[self.offset :])
            # A buffered element precedes the remaining lazy rows.
            stream = LazyRowStream(
                rows if stream is None else chain(rows, stream.rows), chunk.states, self.offset
            )
            self.chunk = None
        self._lazy_rows = stream
        return stream

    def end_lazy_rows(self) -> None:
        """Record that `lazy_rows` ended, after the last element or an error."""
        self._lazy_rows = None

    def consume(self, count: int) -> None:
        """Consume `count` of the buffered elements."""
        assert self.chunk is not None
        end = self.offset + count
        if end == self.chunk.size:
            self.chunk = None
        else:
            self.offset = end

    def skip(self, count: int) -> int:
        """Skip up to `count` elements, avoiding calls where possible; return how many."""
        if self._lazy_rows is not None:
            self.set_state(self.get_state())  # making the rows may call user functions
        from_buffer = min(count, self.num_buffered)
        if from_buffer:
            self.consume(from_buffer)
        return (
            from_buffer + self.input.skip(count - from_buffer)
            if from_buffer < count
            else from_buffer
        )

    def get_state(self) -> State:
        """Return the state before the next element."""
        if self.chunk is not None:
            return self.chunk.state_at(self.offset)
        if self._lazy_rows is not None:
            return self._lazy_rows.states(0)
        return self.input.get_state()

    def set_state(self, state: State) -> None:
        """Restore a state that `get_state` returned."""
        self.chunk = self._lazy_rows = None
        self.input.set_state(state)

    def seek(self, position: int) -> None:
        """Make the input's element number `position` the next one (`ElementIterator.seek`)."""
        self.chunk = self._lazy_rows = None
        self.input.seek(position)

    def close(self) -> None:
        """Close the input."""
        self.chunk = self._lazy_rows = None
        self.input.close()
