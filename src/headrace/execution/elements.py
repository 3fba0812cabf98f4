"""Iterators of index plans, and of the elements that a source has at indices."""

from __future__ import annotations

from functools import partial

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.structure import flatten
from headrace.execution.assigned_iterators import AssignedLeafIterator
from headrace.execution.context import Context
from headrace.execution.element_numbers import number_positions
from headrace.execution.iterator import (
    ElementIterator,
    State,
    make_iterator,
)
from headrace.execution.step_iterator import StepIterator
from headrace.plan.combined_sources import reads_unresolved_source, resolve_randomness
from headrace.plan.elements import GatherIndices, Indices
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, IndexedSource
from headrace.plan.traverse import cardinality

__all__ = [
    "GatherIterator",
    "IndexPlanIterator",
    "IndicesIterator",
    "RepeatedIndicesIterator",
    "RowsIterator",
]


class _IndexedRowsIterator(ElementIterator):
    """Base class of iterators over `Indices`; the state is the number of elements read."""

    def __init__(self, first: int, size: int, context: Context) -> None:
        self._wants_element_numbers = context.wants_element_numbers
        self._first = first
        self._size = size
        self._next = 0

    def get_state(self) -> State:
        return self._next

    def set_state(self, state: State) -> None:
        self._next = state

    def skip(self, count: int) -> int:
        if self._size != INFINITE:
            count = max(0, min(count, self._size - self._next))
        self._next += count
        return count


@make_iterator.register(Indices)
class IndicesIterator(_IndexedRowsIterator):
    """Yields consecutive indices."""

    def __init__(self, indices: Indices, context: Context) -> None:
        super().__init__(indices.start, indices.size, context)

    def next_chunk(self, limit: int) -> Chunk | None:
        start = self._next
        stop = start + limit if self._size == INFINITE else min(start + limit, self._size)
        if stop <= start:
            return None
        self._next = stop
        indices = np.arange(self._first + start, self._first + stop)
        element_numbers = (
            number_positions(start, stop - start) if self._wants_element_numbers else None
        )
        return Chunk.of_columns(indices, stop - start, start.__add__, element_numbers)

    def seek(self, position: int) -> None:
        self._next = position


class RepeatedIndicesIterator(ElementIterator):
    """Yields the same indices in each epoch, with the elements and states of `RepeatIterator`.

    A chunk contains several epochs if they are short: one chunk per epoch would cost many times
    more than the elements of a small dataset.

    Args:
        indices: The indices of an epoch; at least one.
        count: Number of epochs; None repeats forever.
        aligns_chunks_to_epochs: Whether every chunk ends with its epoch.
    """

    def __init__(
        self, indices: Indices, count: int | None, *, aligns_chunks_to_epochs: bool = False
    ) -> None:
        self._first, self._size = indices.start, indices.size
        self._count = count
        self._aligns_chunks_to_epochs = aligns_chunks_to_epochs
        self._epoch = 0
        self._num_yielded = 0  # in this epoch

    def next_chunk(self, limit: int) -> Chunk | None:
        size = self._size
        if self._num_yielded == size:
            self._epoch, self._num_yielded = self._epoch + 1, 0
        if self._count is not None and self._epoch >= self._count:
            return None
        first, start, epoch = self._first, self._num_yielded, self._epoch
        stop = start + limit
        if self._aligns_chunks_to_epochs or limit < 2 * size:
            stop = min(stop, size)
        elif self._count is not None:
            stop = min(stop, (self._count - epoch) * size)
        indices = np.arange(start, stop)
        if stop > size:
            indices %= size
        if first:
            indices += first
        num_epochs, self._num_yielded = self._locate(stop)
        self._epoch = epoch + num_epochs
        return Chunk.of_columns(indices, stop - start, partial(self._state, epoch, start))

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the epoch of the index before a position, and how many indices it yielded."""
        epoch, index = divmod(position - 1, self._size)
        return epoch, index + 1

    def _state(self, epoch: int, start: int, index: int) -> State:
        num_epochs, num_yielded = self._locate(start + index) if index else (0, start)
        return {"epoch": epoch + num_epochs, "input": num_yielded}

    def get_state(self) -> State:
        return {"epoch": self._epoch, "input": self._num_yielded}

    def set_state(self, state: State) -> None:
        self._epoch, self._num_yielded = state["epoch"], state["input"] or 0

    def seek(self, position: int) -> None:
        self._epoch, self._num_yielded = divmod(position, self._size)


class IndexPlanIterator(ElementIterator):
    """Iterator of a whole index plan; its state is the number of elements read.

    The iterators of its steps only need `next_chunk` and `seek`.
    """

    def __init__(self, node: Node, context: Context) -> None:
        self._node = node
        self._wants_element_numbers = context.wants_element_numbers
        # Positions are only known here, so the steps make no element numbers.
        self._steps = make_iterator(node, context.with_element_numbers(False))
        self._position = 0
        #: Whether the steps are at `_position`. They seek before the first read, so that a step
        #: that drops elements does not read them.
        self._is_positioned = False

    def next_chunk(self, limit: int) -> Chunk | None:
        start = self._position
        chunk = self._read(start, limit)
        if chunk is None:
            return None
        self._position = start + chunk.size
        if self._wants_element_numbers:
            chunk = chunk.with_metadata(number_positions(start, chunk.size))
        return chunk.with_states(start.__add__)

    def _read(self, start: int, limit: int) -> Chunk | None:
        """Return elements from a position on; skip a failed element when its error is raised."""
        while True:
            if not self._is_positioned:
                self._steps.seek(start)
            self._is_positioned = False  # in case of an error
            try:
                chunk = self._steps.next_chunk(limit)
            except Exception:
                if limit > 1:  # read one by one to find the element that failed
                    limit = 1
                    continue
                self._position = start + 1
                raise
            self._is_positioned = True
            return chunk

    def get_state(self) -> State:
        return self._position

    def set_state(self, state: State) -> None:
        self._position = state
        self._is_positioned = False

    def seek(self, position: int) -> None:
        self.set_state(position)

    def skip(self, count: int) -> int:
        size = cardinality(self._node)
        count = count if size == INFINITE else max(0, min(count, size - self._position))
        self.set_state(self._position + count)
        return count

    def close(self) -> None:
        self._steps.close()


def build_index_iterator(node: Node, context: Context) -> ElementIterator:
    """Return the iterator of a leaf: of its assigned splits, if any, or of the whole index plan."""
    if context.split_provider is not None:
        return AssignedLeafIterator(node, context)
    if isinstance(node, Indices):  # each element is at its own position
        return make_iterator(node, context)
    return IndexPlanIterator(node, context)


@make_iterator.register(GatherIndices)
def _make_gather(node: GatherIndices, context: Context) -> ElementIterator:
    # Looked up before `node` is replaced by a copy, which has another `id`.
    borrows = id(node) in context.borrowing_steps
    if reads_unresolved_source(node):
        source = resolve_randomness(node.source, context.iteration_entropy)
        node = node.with_parameters(source=source)
    if context.split_provider is None and isinstance(node.input, Indices):
        return RowsIterator(
            node.source, node.input.start, node.input.size, context, borrows=borrows
        )
    return GatherIterator(node, context, borrows=borrows)


class RowsIterator(_IndexedRowsIterator):
    """Reads the elements of a source in order: a `GatherIndices` over `Indices`, the usual case.

    The state is the number of elements read.
    """

    def __init__(
        self, source: IndexedSource, first: int, size: int, context: Context, *, borrows: bool
    ) -> None:
        super().__init__(first, size, context)
        self._read_run = source.gather_run_borrowed if borrows else source.gather_run
        self._can_read_ahead = not source.runs_user_code
        self.is_small: bool = source.is_small
        #: Elements before this one could not be fetched together.
        self._single_reads_end = 0

    @property
    def can_read_ahead(self) -> bool:
        return self._can_read_ahead

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            start, size = self._next, self._size
            stop = start + (1 if start < self._single_reads_end else limit)
            if stop > size >= 0:
                stop = size
            if stop <= start:
                return None
            first = self._first
            try:
                columns = self._read_run(first + start, first + stop)
            except Exception:
                if stop - start > 1:
                    self._single_reads_end = stop
                    continue
                self._next = stop
                raise
            self._next = stop
            element_numbers = (
                number_positions(start, stop - start) if self._wants_element_numbers else None
            )
            return Chunk.of_columns(columns, stop - start, start.__add__, element_numbers)


class GatherIterator(StepIterator):
    """Fetches the elements at the indices of its input, one chunk at a time."""

    def __init__(self, node: GatherIndices, context: Context, *, borrows: bool) -> None:
        source = node.source
        if borrows and source.can_borrow_runs:
            context = context.with_epoch_aligned_chunks()
        super().__init__(build_index_iterator(node.input, context))
        self._read = source.gather_borrowed if borrows else source.gather
        self._can_read_ahead = not node.source.runs_user_code

    @property
    def can_read_ahead(self) -> bool:
        return self._can_read_ahead

    def _produce(self, limit: int) -> Chunk | None:
        while True:
            chunk = self._input_buffer.peek(limit)
            if chunk is None:
                return None
            start = self._input_buffer.offset
            part = chunk.slice(start, start + (1 if chunk is self._failed_chunk else limit))
            try:
                result = self._gather(part)
            except Exception as error:
                if part.size == 1:
                    self._pending_error = error
                    return None
                self._failed_chunk = chunk
                continue
            self._input_buffer.consume(part.size)
            return result

    def _gather(self, chunk: Chunk) -> Chunk:
        if not chunk.is_columnar:
            rows = chunk.rows()
            leaves, _ = flatten(rows[0])
            if any(isinstance(leaf, np.ndarray) for leaf in leaves):  # batches of any size
                result = [self._read(row) for row in rows]
                return Chunk.of_rows(result, chunk.states, chunk.compact_metadata)
        result = self._read(chunk.columns())
        return Chunk.of_columns(result, chunk.size, chunk.states, chunk.compact_metadata)

    def skip(self, count: int) -> int:
        self._pending_error = None
        return self._input_buffer.skip(count)
