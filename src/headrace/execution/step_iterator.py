"""Base classes of steps over one input: buffering, states, and errors in order.

    class TakeWhileIterator(RowStepIterator):
        '''Ends before the first element for which the predicate is false.'''

        def step(self, row):
            return row if self.call(row) else END

is a complete step. It satisfies the rules of `iterator` without further code: an error is raised in
the failing element's turn, the function is called once per element and only for requested elements,
and every element has a state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.metadata import element_numbers, has_element_ids
from headrace.execution.element_ids import attach_element_position
from headrace.execution.element_numbers import nest_ids
from headrace.execution.input_buffer import InputBuffer, LazyRowStream
from headrace.execution.iterator import END, ElementIterator, LazyRows, State, element_position
from headrace.plan.user_function import UserFunction

__all__ = [
    "NO_ELEMENT",
    "ROWS_AT_ONCE",
    "RowStepIterator",
    "StepIterator",
    "UndeliveredInput",
    "mask_to_runs",
    "part_states",
    "runs_to_mask",
    "select_states",
    "tag_part",
]

NO_ELEMENT: Any = type("Nothing", (), {"__doc__": "Result of `step` that yields no element."})()

ROWS_AT_ONCE = 64
"""Minimum number of rows taken from a chunk at once when few elements are requested."""


class StepIterator(ElementIterator):
    """A step over one input whose state is its input's.

    Subclasses implement `_produce`. Steps that process whole chunks repeat a failed chunk element
    by element (`_failed_chunk`) to find the element that failed.
    """

    def __init__(self, input_: ElementIterator) -> None:
        self._input_buffer = InputBuffer(input_)
        #: Error of the next element of the input buffer, to be raised in its turn.
        self._pending_error: Exception | None = None
        #: Chunk that could not be processed as a whole.
        self._failed_chunk: Chunk | None = None

    @property
    def can_read_ahead(self) -> bool:
        return self._input_buffer.input.can_read_ahead

    @abstractmethod
    def _produce(self, limit: int) -> Chunk | None:
        """Return 1 to `limit` elements, or None at the end.

        A failed element stays in the buffer as the next one, with its error in `_pending_error`.
        """

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._pending_error is None:
            chunk = self._produce(limit)
            if chunk is not None or self._pending_error is None:
                return chunk
        failure, self._pending_error = self._pending_error, None
        self._consume(1)
        raise failure

    def _consume(self, count: int) -> None:
        """Consume `count` of the buffered elements."""
        if count:
            self._input_buffer.consume(count)

    def get_state(self) -> State:
        return self._input_buffer.get_state()

    def set_state(self, state: State) -> None:
        self._pending_error = self._failed_chunk = None
        self._input_buffer.set_state(state)

    def close(self) -> None:
        self._pending_error = self._failed_chunk = None
        self._input_buffer.close()


class RowStepIterator(StepIterator):
    """A step that calls a user's function for its input's elements, one by one."""

    @property
    def can_read_ahead(self) -> bool:
        return False

    def __init__(self, input_: ElementIterator, call: UserFunction) -> None:
        super().__init__(input_)
        self.call = call
        self._has_ended = False
        self._rows_seen = 0  # elements of the input since this iterator was made

    @abstractmethod
    def step(self, row: Any) -> Any:
        """Return the result for `row`, or NO_ELEMENT, or END."""

    def _produce(self, limit: int) -> Chunk | None:
        while not self._has_ended:
            chunk = self._input_buffer.peek_ahead(limit)
            if chunk is None:
                return None
            result = self._apply_to_rows(chunk, limit)
            if result is not None or self._pending_error is not None:
                return result
        return None

    def _apply_to_rows(self, chunk: Chunk, limit: int) -> Chunk | None:
        """Return the results for elements of the buffered chunk, or None if there are none."""
        start = self._input_buffer.offset
        rows = chunk.rows()[start : start + max(limit, ROWS_AT_ONCE)]
        results: list[Any] = []
        indices: list[int] = []
        step, seen = self.step, 0
        try:
            for row in rows:
                result = step(row)
                if result is not NO_ELEMENT:
                    if result is END:
                        self._has_ended = True
                        break
                    results.append(result)
                    indices.append(start + seen)
                    if len(results) == limit:
                        seen += 1
                        break
                seen += 1
        except BaseException as error:
            self._defer_error(error, chunk, start + seen)
        self._consume(seen)
        if not results:
            return None
        states = select_states(chunk.states, indices, start + seen)
        return Chunk.of_rows(results, states, chunk.take_compact_metadata(indices))

    def _defer_error(self, error: BaseException, chunk: Chunk, index: int) -> None:
        """Store the error of element `index` of the buffered chunk until its turn."""
        count = self._rows_seen + index - self._input_buffer.offset
        number = element_position(chunk.state_at(index), count)
        rows = chunk.rows()
        self._pending_error = self.call.wrap_error(error, number, *rows[index : index + 1])
        attach_element_position(self._pending_error, chunk.metadata, index)

    def _wrap_row_error(
        self, error: BaseException, lazy_rows: LazyRowStream, count: int, row: Any
    ) -> Exception:
        """Return the error to raise for a failed row, number `count` of the lazy rows."""
        lazy_rows.num_taken += count - 1
        number = element_position(lazy_rows.states(0), self._rows_seen + count - 1)
        lazy_rows.num_taken += 1  # the position is after it
        return self.call.wrap_error(error, number, row)

    def _record_row_error(self, lazy_rows: LazyRowStream, start: int, count: int) -> None:
        """Record an error of lazy row number `count`, which is being raised.

        Args:
            lazy_rows: The rows.
            start: `lazy_rows.num_taken` before the first of them.
            count: Number of the row that failed.
        """
        self._rows_seen += count
        if lazy_rows.num_taken == start:  # the error is the input's
            self._input_buffer.end_lazy_rows()

    def _record_rows(self, count: int) -> None:
        """Record that the lazy rows ended after `count` of them."""
        self._rows_seen += count
        self._input_buffer.end_lazy_rows()

    def _consume(self, count: int) -> None:
        self._rows_seen += count
        super()._consume(count)

    def set_state(self, state: State) -> None:
        self._has_ended = False
        super().set_state(state)


def select_states(states: States, indices: Sequence[int], end: int) -> States:
    """Return the states before selected elements of a chunk.

    Args:
        states: States of the whole chunk.
        indices: Indices of the selected elements.
        end: The state after the last one is that before this element of the chunk.
    """
    count = len(indices)
    return lambda index: states(indices[index] if index < count else end)


def tag_part(name: str, number: int, chunk: Chunk, *, above_boundary: bool = False) -> Chunk:
    """Add the number of a part of a stream to the states and element numbers of its elements.

    Args:
        name: Key of the number in the states.
        number: Number of the part.
        chunk: Elements of the part.
        above_boundary: Whether to change element numbers also above a partition boundary, because
            no step of a client stage will do so.
    """
    column = chunk.compact_metadata
    if isinstance(column, np.ndarray):
        part = np.array([number], np.uint64)
        if above_boundary and has_element_ids(column) and element_numbers(column) is not None:
            column = column.copy()
            column["number"] = nest_ids(part, column["number"])
            chunk = chunk.with_metadata(column)
        else:
            chunk = chunk.with_metadata(nest_ids(part, column))
    return chunk.with_states(part_states(name, number, chunk.states))


def part_states(name: str, number: int, states: States) -> States:
    """Return states that combine the number of a part of a stream with the states in it."""
    return lambda index: {name: number, "input": states(index)}


# --- In-order continuation of an unordered step ---------------------------------------------------


class UndeliveredInput(ElementIterator):
    """Input of an unordered step, without the elements whose results were delivered.

    With it, a step that holds nothing can restore states of an unordered step with threads: a
    position before all missing elements, and the set of later elements that were delivered.
    """

    def __init__(self, input_: ElementIterator) -> None:
        self._input = input_
        self.has_lazy_rows: bool = input_.has_lazy_rows
        self._delivered_mask = 0  # bit i: element i from the current position on was delivered

    @property
    def can_read_ahead(self) -> bool:
        return self._input.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return self._input.preferred_limit

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._delivered_mask & 1:
            self._skip_delivered()
        delivered = self._delivered_mask
        if delivered:
            limit = min(limit, (delivered & -delivered).bit_length() - 1)
        try:
            chunk = self._input.next_chunk(limit)
        except Exception:
            self._delivered_mask >>= 1  # failed elements are counted as well
            raise
        if chunk is None:
            return None
        self._delivered_mask >>= chunk.size
        return chunk.with_states(_masked_states(delivered, chunk.states))

    def _skip_delivered(self) -> None:
        """Skip delivered elements; failed ones were delivered as errors."""
        delivered = self._delivered_mask
        count = (~delivered & (delivered + 1)).bit_length() - 1
        try:
            chunk = self._input.next_chunk(count)
        except Exception:
            count = 1
        else:
            count = count if chunk is None else chunk.size
        self._delivered_mask >>= count

    def lazy_rows(self) -> LazyRows | None:
        if self._delivered_mask:
            return super().lazy_rows()
        rows_and_states = self._input.lazy_rows()
        return (
            None
            if rows_and_states is None
            else (rows_and_states[0], _masked_states(0, rows_and_states[1]))
        )

    def get_state(self) -> State:
        return {"delivered": mask_to_runs(self._delivered_mask), "input": self._input.get_state()}

    def set_state(self, state: State) -> None:
        self._delivered_mask = runs_to_mask(state["delivered"])
        self._input.set_state(state["input"])

    def skip(self, count: int) -> int:
        return super().skip(count) if self._delivered_mask else self._input.skip(count)

    def close(self) -> None:
        self._input.close()


def _masked_states(delivered_mask: int, states: States) -> States:
    return lambda index: {
        "delivered": mask_to_runs(delivered_mask >> index),
        "input": states(index),
    }


# --- Sets of small numbers: bits of an integer in memory, runs in states --------------------------


def runs_to_mask(runs: Iterable[Sequence[int]]) -> int:
    """Return an integer with the bits of these runs, each [first, one after the last]."""
    mask = 0
    for start, stop in runs:
        mask |= (1 << stop) - (1 << start)
    return mask


def mask_to_runs(mask: int) -> list[list[int]]:
    """Return the runs of set bits, in order."""
    runs = []
    offset = 0
    while mask:
        low = (mask & -mask).bit_length() - 1
        mask >>= low
        size = (~mask & (mask + 1)).bit_length() - 1
        mask >>= size
        runs.append([offset + low, offset + low + size])
        offset += low + size
    return runs
