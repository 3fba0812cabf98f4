"""Iterators of the client stage over splits, read sequentially or in round-robin order.

Their states are those of a single process, except for the position within a split:
`{"ordinal": n}`, and the number of errors raised in the split, if any (`"failed"`).
"""

from __future__ import annotations

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.metadata import element_numbers
from headrace.errors import FailedPreconditionError
from headrace.execution.context import Context, WholeSplitSource
from headrace.execution.input_buffer import ChunkSizer
from headrace.execution.interleave import InterleaveIterator
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.nested_dataset import NestedDataset, OpenResult
from headrace.execution.split_elements import (
    FILTERED_OUT,
    MID_SPLIT_STATE_MESSAGE,
    SplitElementsIterator,
)
from headrace.execution.step_iterator import select_states
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.source import INFINITE

__all__ = ["InterleaveSplitsIterator", "ReadSplitsIterator"]


@make_iterator.register(ReadSplits)
def _make_read_splits(node: ReadSplits, context: Context) -> ElementIterator:
    assert context.split_source is not None
    if node.cycle_length > 1:
        return InterleaveSplitsIterator(node, context)
    return ReadSplitsIterator(node, context)


class _EpochSplits:
    """The splits of a step in one epoch."""

    def __init__(self, node: ReadSplits, context: Context) -> None:
        self.size = node.num_splits
        self._node = node
        self._epochs = context.epochs[len(context.epochs) - len(node.strides) :]

    def has(self, index: int) -> bool:
        """Return whether there is a split with this number."""
        return self.size == INFINITE or index < self.size

    def global_index(self, index: int) -> int:
        """Return the split index of a split of the epoch."""
        return self._node.split_at(self._epochs, index)


class ReadSplitsIterator(ElementIterator):
    """Reads splits one after the other."""

    def __init__(self, node: ReadSplits, context: Context) -> None:
        assert context.split_source is not None
        self._source = context.split_source
        self._node = node
        self._splits = _EpochSplits(node, context)
        self._wants_element_numbers = context.wants_element_numbers
        self._has_element_numbers = context.splits_have_numbers
        self._index = 0  # of the split in the epoch
        self._input: SplitElementsIterator | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._splits.has(self._index):
            if self._input is None:
                whole_splits = self._read_whole_splits(limit)
                if whole_splits is not None:
                    return whole_splits
                self._input = self._open()
            chunk = self._input.next_chunk(limit)
            if chunk is not None:
                return _keep_numbers(chunk, self._wants_element_numbers).with_states(
                    _states_in_split(self._index, chunk.states)
                )
            self._input.close()
            self._input = None
            self._index += 1
        return None

    def _read_whole_splits(self, limit: int) -> Chunk | None:
        """Return the elements of many whole splits, if they are buffered."""
        if not isinstance(self._source, WholeSplitSource) or self._wants_element_numbers:
            return None
        first = self._index
        max_splits = (
            limit if self._splits.size == INFINITE else min(limit, self._splits.size - first)
        )
        splits_read = self._source.read_whole_splits(
            self._splits.global_index(first), max_splits, limit
        )
        if splits_read is None:
            return None
        chunk, num_splits = splits_read
        self._index += num_splits
        elements_per_split = chunk.size // num_splits
        return chunk.with_states(
            lambda index: {
                "split": first + index // elements_per_split,
                "ordinal": index % elements_per_split,
            }
        )

    def _open(self) -> SplitElementsIterator:
        return SplitElementsIterator(
            self._source,
            self._splits.global_index(self._index),
            has_element_numbers=self._has_element_numbers,
            defers_errors=self._node.defers_errors,
        )

    def get_state(self) -> State:
        split_state = {"ordinal": 0} if self._input is None else self._input.get_state()
        return {"split": self._index, **split_state}

    def set_state(self, state: State) -> None:
        self.close()
        if not isinstance(state, dict) or "split" not in state:
            state = self._node.convert_state(state)
            if state is None:
                raise FailedPreconditionError(MID_SPLIT_STATE_MESSAGE)
        self._index = state["split"]
        if self._splits.has(self._index):
            self._input = self._open()
            self._input.set_state(state)

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = None


def _states_in_split(index: int, states: States) -> States:
    return lambda position: {"split": index, **states(position)}


def _keep_numbers(chunk: Chunk, wants_element_numbers: bool) -> Chunk:
    """Return a chunk with plain element numbers as metadata, or with none."""
    numbers = (
        None
        if not wants_element_numbers or chunk.metadata is None
        else element_numbers(chunk.metadata)
    )
    return chunk.with_metadata(None if numbers is None else np.ascontiguousarray(numbers))


class _SplitOpener:
    """Opens splits as the datasets of an interleave, in place of outer elements.

    Args:
        node: The step.
        context: Context of the step.
    """

    reads_coordinated_job = False

    def __init__(self, node: ReadSplits, context: Context) -> None:
        assert context.split_source is not None
        self._source = context.split_source
        self._splits = _EpochSplits(node, context)
        self._has_element_numbers = context.splits_have_numbers
        self._min_elements = node.block_length
        self._defers_errors = node.defers_errors
        self._next = 0

    def open_next(self) -> OpenResult:
        """Open the next split."""
        index = self._next
        if not self._splits.has(index):
            return OpenResult(_count_from(index), index, is_end=True)
        self._next = index + 1
        elements = self._open_split(index)
        error = elements.find_open_error()
        if error is not None:
            elements.close()
            return OpenResult(_count_from(index), index, error=error)
        return OpenResult(_count_from(index), index, dataset=self._make_dataset(index, elements))

    def open_at(self, outer_state: State, number: int) -> NestedDataset:
        """Open the split with number `outer_state` in the epoch.

        Raises:
            FailedPreconditionError: If the state was saved by a single process, in another form.
        """
        if not isinstance(outer_state, int):
            raise FailedPreconditionError(MID_SPLIT_STATE_MESSAGE)
        return self._make_dataset(outer_state, self._open_split(outer_state))

    def _open_split(self, index: int) -> SplitElementsIterator:
        split = self._splits.global_index(index)
        return SplitElementsIterator(
            self._source,
            split,
            fills_gaps=True,
            has_element_numbers=self._has_element_numbers,
            defers_errors=self._defers_errors,
        )

    def _make_dataset(self, index: int, elements: SplitElementsIterator) -> NestedDataset:
        return NestedDataset(
            _count_from(index),
            index,
            elements,
            ChunkSizer(min_elements=self._min_elements),
            _NO_OUTER_ID,
        )

    def position(self) -> tuple[States, int]:
        """Return the states from the next split on, and its number."""
        return _count_from(self._next), self._next

    def set_state(self, state: State, number: int) -> None:
        """Restore a state."""
        if not isinstance(state, int):
            raise FailedPreconditionError(MID_SPLIT_STATE_MESSAGE)
        self._next = state

    def close(self) -> None:
        """Do nothing; no resources are held here."""


_NO_OUTER_ID = np.zeros(1, np.uint64)


def _count_from(index: int) -> States:
    return index.__add__


class InterleaveSplitsIterator(ElementIterator):
    """Reads several splits in round-robin order, like the datasets of an interleave."""

    def __init__(self, node: ReadSplits, context: Context) -> None:
        self._interleave = InterleaveIterator(node, context, _SplitOpener(node, context))
        self._wants_element_numbers = context.wants_element_numbers

    def next_chunk(self, limit: int) -> Chunk | None:
        while (chunk := self._interleave.next_chunk(limit)) is not None:
            assert chunk.metadata is not None
            is_dropped = chunk.metadata["split"] == FILTERED_OUT
            if is_dropped.any():
                indices = np.flatnonzero(~is_dropped)
                if not len(indices):
                    continue
                states = select_states(chunk.states, indices.tolist(), chunk.size)
                chunk = chunk.take(indices).with_states(states)
            return _keep_numbers(chunk, self._wants_element_numbers)
        return None

    def get_state(self) -> State:
        return self._interleave.get_state()

    def set_state(self, state: State) -> None:
        self._interleave.set_state(state)

    def close(self) -> None:
        self._interleave.close()
