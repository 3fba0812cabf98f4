"""Iterators of the steps that join elements into batches, and of the step that splits them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, DeferredMetadata, States
from headrace.element.chunk import concatenate as concatenate_chunks
from headrace.element.compact_columns import MetadataColumn
from headrace.element.metadata import concatenate_metadata, group_metadata
from headrace.element.ragged import stack_ragged
from headrace.element.stack import StackedElement
from headrace.element.structure import Element, describe_component, flatten
from headrace.element.transpose import map_leaves
from headrace.element.wire import frame_bytes
from headrace.errors import InvalidElementError
from headrace.execution.assigned_iterators import count_finished_splits, is_within_split
from headrace.execution.context import Context
from headrace.execution.element_numbers import nest_ids
from headrace.execution.input_buffer import InputBuffer
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.step_iterator import mask_to_runs, runs_to_mask
from headrace.plan.batching import Batch, PaddedBatch, RaggedBatch, Unbatch
from headrace.plan.node import Node
from headrace.plan.user_function import step_name

__all__ = [
    "BatchIterator",
    "PaddedBatchIterator",
    "RaggedBatchIterator",
    "UnbatchIterator",
]

_MAX_ELEMENTS = 1 << 16
_MAX_BYTES_TOGETHER = 1 << 16
"""Bytes of batches to stack before the first is returned; returning one costs about as much."""


@make_iterator.register(Batch)
class BatchIterator(ElementIterator):
    """Stacks consecutive elements. A batch is fresh memory that its receiver owns.

    The state holds no elements: it is the position of the next batch's first element. After a
    restore, errors within that batch occur again, so the state also records which elements from
    that position on (by ordinal, as runs) have failed already; their errors are not raised again.
    """

    _verb = "stack"

    def __init__(self, node: Batch | PaddedBatch | RaggedBatch, context: Context) -> None:
        self._node = node
        self._size = node.size
        self._input_buffer = InputBuffer(make_iterator(node.input, context))
        #: Whether each batch is one assigned split; the last split may be short.
        self._is_one_split = context.split_provider is not None and _is_one_split_per_batch(
            node, context
        )
        self._reset(0)

    @property
    def can_read_ahead(self) -> bool:
        return self._input_buffer.input.can_read_ahead

    def _reset(self, failed_mask: int) -> None:
        self._parts: list[Chunk] = []  # of a batch that an error interrupted
        self._num_buffered = 0  # elements in them
        self._split: int | None = None  # split of the batch, set once one of its elements failed
        self._num_failed_in_split = 0  # failed elements of that split
        self._num_seen = 0  # elements since the state's position, including failed ones
        #: Bit i: the error of element i after the state's position was raised.
        self._failed_mask = failed_mask

    def next_chunk(self, limit: int) -> Chunk | None:
        size = self._size
        if limit > 1 and not self._num_buffered and not self._failed_mask and self._split is None:
            batches = self._take_batches(limit)
            if batches is not None:
                return batches
        while self._num_buffered < size:
            if self._is_one_split and self._is_split_finished():
                break
            try:
                # A split with missing elements is not filled up with elements of the next split.
                part = self._input_buffer.take(
                    max(1, size - self._num_buffered - self._num_failed_in_split),
                    are_needed=not self._is_one_split,
                )
            except Exception:
                if self._is_known_failure():
                    continue
                raise
            if part is None:
                break
            self._parts.append(part)
            self._num_buffered += part.size
            self._num_seen += part.size
        parts, num_buffered = self._parts, self._num_buffered
        failed_mask, num_seen = self._failed_mask, self._num_seen
        is_short = num_buffered + self._num_failed_in_split < size
        self._reset(failed_mask >> num_seen)
        if not num_buffered or (self._node.drop_remainder and is_short):
            return None
        try:
            batch = self._join(parts)
        except InvalidElementError as error:
            raise InvalidElementError(
                f"{step_name(self._node)} cannot {self._verb}: {error}"
            ) from error
        first_states, last_states, last_size = parts[0].states, parts[-1].states, parts[-1].size
        failed_mask_after = self._failed_mask
        if failed_mask >> (num_seen - 1) & 1:  # the input ended with a failed element
            input_state = self._input_buffer.get_state()
            last_states = lambda index: input_state  # noqa: E731

        def states(index: int) -> State:
            if index:
                return _state(failed_mask_after, last_states(last_size))
            return _state(failed_mask, first_states(0))

        return Chunk.of_rows([batch], states).with_metadata(_batch_ids(parts))

    def _join(self, parts: Sequence[Chunk]) -> StackedElement:
        """Return the elements of a batch joined into one, in fresh memory."""
        if len(parts) > 1:
            parts = [part.with_metadata(None) for part in parts]  # only the batch needs metadata
        return concatenate_chunks(parts).columns()

    def _can_reshape(self, columns: StackedElement) -> bool:
        """Return whether a batch of columnar rows is a reshaped slice of the columns."""
        return True

    def _is_known_failure(self) -> bool:
        """Count an error of the input; return whether it was raised before the state was saved."""
        is_known = bool(self._failed_mask >> self._num_seen & 1)
        if self._is_one_split:
            self._count_failed_element()
        self._failed_mask |= 1 << self._num_seen
        self._num_seen += 1
        if not self._num_buffered:  # the position is after it
            self._failed_mask, self._num_seen = self._failed_mask >> self._num_seen, 0
        return is_known

    def _count_failed_element(self) -> None:
        """Count a failed element of the current batch's split."""
        if not self._num_buffered:
            state = self._input_buffer.get_state()
            if not is_within_split(state):  # it was the last; the batch is made of the next split
                self._split, self._num_failed_in_split = None, 0
                return
            self._split = count_finished_splits(state)
        self._num_failed_in_split += 1

    def _take_batches(self, limit: int) -> Chunk | None:
        """Return several whole batches at once if enough elements are buffered.

        Columns are only reshaped. Batches of rows are stacked one by one.
        """
        size = self._size
        if limit * size > _MAX_ELEMENTS:
            limit = max(1, _MAX_ELEMENTS // size)
        try:
            chunk = self._input_buffer.peek(limit * size)
        except Exception:
            if self._is_one_split:
                self._count_failed_element()
            raise
        num_batches = min(self._input_buffer.num_buffered // size, limit)
        if chunk is None or not num_batches:
            return None
        if not chunk.is_columnar:
            batches = self._stack_batches(chunk, num_batches)
            return (
                None if not batches else self._consume_batches(len(batches), Chunk.of_rows(batches))
            )
        if not self._can_reshape(chunk.columns()):
            return None
        start, stop = self._input_buffer.offset, self._input_buffer.offset + num_batches * size
        columns = map_leaves(
            lambda leaf: leaf.reshape(num_batches, size, *leaf.shape[1:]),
            chunk.slice(start, stop).columns(),
        )
        return self._consume_batches(num_batches, Chunk.of_columns(columns, num_batches))

    def _stack_batches(self, chunk: Chunk, count: int) -> list[Element]:
        """Return up to `count` batches of buffered rows, limited by their size in bytes."""
        batches: list[Element] = []
        size, start = self._size, self._input_buffer.offset
        remaining_bytes = _MAX_BYTES_TOGETHER
        while len(batches) < count and remaining_bytes > 0:
            try:
                batches.append(self._join([chunk.slice(start, start + size)]))
            except Exception:
                break  # raised after the batches before it were returned
            start += size
            remaining_bytes -= frame_bytes(Chunk.of_rows(batches[-1:]))
        return batches

    def _consume_batches(self, count: int, batches: Chunk) -> Chunk:
        """Consume the elements of `count` batches and return the batches with their states."""
        size = self._size
        taken = self._input_buffer.take(count * size)
        assert taken is not None
        states = taken.states
        metadata = None if taken.metadata is None else group_metadata(taken.metadata, size)
        return batches.with_metadata(metadata).with_states(
            lambda index: _state(0, states(index * size))
        )

    def _is_split_finished(self) -> bool:
        """Return whether the split that the batch begins with is exhausted."""
        if self._split is None:
            if not self._num_buffered:
                return False
            self._split = count_finished_splits(self._parts[0].state_at(0))
        return count_finished_splits(self._input_buffer.get_state()) != self._split

    def get_state(self) -> State:
        state = self._parts[0].state_at(0) if self._parts else self._input_buffer.get_state()
        return _state(self._failed_mask, state)

    def set_state(self, state: State) -> None:
        self._reset(runs_to_mask(state["failed"]))
        self._input_buffer.set_state(state["input"])

    def seek(self, position: int) -> None:
        self._reset(0)
        self._input_buffer.seek(position * self._size)

    def close(self) -> None:
        self._reset(0)
        self._input_buffer.close()


def _batch_ids(parts: Sequence[Chunk]) -> DeferredMetadata | None:
    """Return a function for a batch's metadata: its first element's number, and all elements' ids.

    Metadata of several small batches is computed together.
    """
    deferred = [each for part in parts if (each := part.deferred_metadata) is not None]
    if not deferred:
        return None

    @functools.cache
    def make() -> MetadataColumn:
        columns = [make_column() for make_column in deferred]
        arrays = [each if isinstance(each, np.ndarray) else each.to_array() for each in columns]
        return group_metadata(concatenate_metadata(arrays), sum(map(len, arrays)))

    return make


def _state(failed_mask: int, input_state: State) -> State:
    return {"failed": mask_to_runs(failed_mask), "input": input_state}


def _is_one_split_per_batch(node: Node, context: Context) -> bool:
    """Return whether each batch is one split: all steps down to the leaf keep splits whole."""
    while id(node) not in context.leaf_numbers:
        if node.input_split_size(1) is None or not node.inputs:
            return False
        (node,) = node.inputs
    return True


@make_iterator.register(Unbatch)
class UnbatchIterator(ElementIterator):
    """Yields the rows of its input's elements; the state counts the rows of the current one."""

    def __init__(self, node: Unbatch, context: Context) -> None:
        self._node = node
        self._input_buffer = InputBuffer(make_iterator(node.input, context))
        self._reset(0)

    @property
    def can_read_ahead(self) -> bool:
        return self._input_buffer.input.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return _MAX_ELEMENTS  # a chunk ends with the element whose rows it contains

    def _reset(self, offset: int) -> None:
        self._rows: Chunk | None = None  # of the current element
        self._states: States | None = None  # before and after the current element
        self._offset = offset  # rows already yielded of the current or the next element

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._rows is None or self._offset >= self._rows.size:
            # Rows of an element that was not read yet are skipped only after a restore.
            num_skipped = 0 if self._rows is not None else self._offset
            self._reset(0)  # if an error is raised, the position is before the next element
            outer = self._input_buffer.take(1)
            if outer is None:
                return None
            (element,) = outer.rows()
            count = self._count_rows(element)
            metadata = outer.metadata
            if metadata is not None:
                metadata = nest_ids(metadata, np.arange(count, dtype=np.uint64))
            self._rows = Chunk.of_columns(element, count, None, metadata)
            self._states, self._offset = outer.states, num_skipped
        start = self._offset
        self._offset = min(start + limit, self._rows.size)
        assert self._states is not None
        rows = self._rows.slice(start, self._offset)
        return rows.with_states(_row_states(self._states, start, self._rows.size))

    def _count_rows(self, element: Element) -> int:
        """Return the number of rows, which must be the same for all components."""
        leaves, structure = flatten(element)
        lengths = {
            path: len(leaf) if getattr(leaf, "ndim", 0) else None
            for path, leaf in zip(structure.paths, leaves, strict=True)
        }
        if None in lengths.values() or len(set(lengths.values())) != 1:
            found = ", ".join(
                f"{describe_component(path)} has "
                f"{'no axis' if length is None else f'{length} rows'}"
                for path, length in lengths.items()
            )
            raise InvalidElementError(
                f"{step_name(self._node)} splits elements along their first axis, whose length "
                "must be the same for all components; "
                f"{found or 'this element has no components'}"
            )
        return next(iter(lengths.values())) or 0

    def get_state(self) -> State:
        if self._rows is None:
            return {"offset": self._offset, "input": self._input_buffer.get_state()}
        assert self._states is not None
        return _row_states(self._states, self._offset, self._rows.size)(0)

    def set_state(self, state: State) -> None:
        self._reset(state["offset"])
        self._input_buffer.set_state(state["input"])

    def close(self) -> None:
        self._reset(0)
        self._input_buffer.close()


def _row_states(states: States, start: int, size: int) -> States:
    """Return the states of rows `start` and following of an element with `size` rows.

    Args:
        states: States before and after the element.
        start: Index of the first row.
        size: Number of rows of the element.
    """

    def state_at(index: int) -> State:
        offset = start + index
        if offset < size:
            return {"offset": offset, "input": states(0)}
        return {"offset": 0, "input": states(1)}

    return state_at


# --- Batches that differ from those of `batch` only in how elements are joined -------------------


@make_iterator.register(PaddedBatch)
class PaddedBatchIterator(BatchIterator):
    """Stacks consecutive elements, each component padded to one shape."""

    _verb = "pad"

    def __init__(self, node: PaddedBatch, context: Context) -> None:
        super().__init__(node, context)
        self._padding = node.padding

    def _join(self, parts: Sequence[Chunk]) -> StackedElement:
        if all(part.is_columnar for part in parts):
            return self._padding.join([part.columns() for part in parts])
        return self._padding.stack(_rows_of(parts))

    def _can_reshape(self, columns: StackedElement) -> bool:
        try:
            return self._padding.needs_no_padding(columns)
        except InvalidElementError:
            return False  # raised, with the step's name, when the batch is made


@make_iterator.register(RaggedBatch)
class RaggedBatchIterator(BatchIterator):
    """Joins consecutive elements, whose arrays may have different lengths."""

    _verb = "join"

    def __init__(self, node: RaggedBatch, context: Context) -> None:
        super().__init__(node, context)
        self._fixed_lengths = frozenset(node.fixed_lengths)

    def _join(self, parts: Sequence[Chunk]) -> StackedElement:
        return stack_ragged(_rows_of(parts), self._fixed_lengths)

    def _can_reshape(self, columns: StackedElement) -> bool:
        return False


def _rows_of(parts: Sequence[Chunk]) -> list[Any]:
    return [row for part in parts for row in part.rows()]
