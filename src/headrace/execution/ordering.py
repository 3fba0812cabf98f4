"""Iterators of the steps that select elements by position.

Each works within an index plan, where it can `seek` a position, and above other steps, where its
state consists of a count and its input's state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.errors import FailedPreconditionError
from headrace.execution.assigned_iterators import AssignedRepeatIterator
from headrace.execution.context import Context
from headrace.execution.elements import RepeatedIndicesIterator
from headrace.execution.iterator import ElementIterator, LazyRows, State, make_iterator
from headrace.execution.step_iterator import part_states, select_states, tag_part
from headrace.plan.elements import FromSource, Indices
from headrace.plan.node import Node
from headrace.plan.ordering import (
    SHARD_HINT,
    Enumerate,
    Repeat,
    ShardBlocks,
    ShardElements,
    Skip,
    Take,
)
from headrace.plan.traverse import cardinality, walk
from headrace.plan.user_function import step_name

__all__ = [
    "EnumerateIterator",
    "RepeatIterator",
    "ShardBlocksIterator",
    "ShardIterator",
    "SkipIterator",
    "TakeIterator",
]

_MAX_EMPTY_EPOCHS = 10_000
_MAX_SKIPPED_AT_ONCE = 1 << 16
"""Maximum number of elements per read while skipping."""
_BLOCK = 64
"""Number of indices that `enumerate` computes at once for lazy rows."""


class _CountingIterator(ElementIterator):
    """Base class of iterators over one input whose own state is a number."""

    def __init__(
        self, node: Take | Skip | ShardElements | ShardBlocks | Enumerate, context: Context
    ) -> None:
        self._input = make_iterator(node.input, context)
        self._count = 0

    @property
    def can_read_ahead(self) -> bool:
        return self._input.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return self._input.preferred_limit

    def get_state(self) -> State:
        return {"count": self._count, "input": self._input.get_state()}

    def set_state(self, state: State) -> None:
        self._count = state["count"]
        self._input.set_state(state["input"])

    def close(self) -> None:
        self._input.close()


def _counted_states(states: States, count: int) -> States:
    """Return the states before elements numbered `count` and following."""
    return lambda index: {"count": count + index, "input": states(index)}


@make_iterator.register(Take)
class TakeIterator(_CountingIterator):
    """Ends after a number of elements; counts the elements yielded."""

    def __init__(self, node: Take, context: Context) -> None:
        super().__init__(node, context)
        self._limit = node.count
        self.has_lazy_rows: bool = self._input.has_lazy_rows
        #: State of the input if the last elements were lazy rows: the input's own state differs.
        self._end: State = None

    def next_chunk(self, limit: int) -> Chunk | None:
        count = self._count
        if self._limit >= 0:
            limit = min(limit, self._limit - count)
            if limit <= 0:
                return None
        chunk = self._input.next_chunk(limit)
        if chunk is None:
            return None
        self._count = count + chunk.size
        return chunk.with_states(_counted_states(chunk.states, count))

    def lazy_rows(self) -> LazyRows | None:
        count = self._count
        if 0 <= self._limit <= count:
            return None
        rows_and_states = self._input.lazy_rows()
        return (
            None
            if rows_and_states is None
            else (self._take_rows(*rows_and_states), _counted_states(rows_and_states[1], count))
        )

    def _take_rows(self, rows: Iterator[Any], states: States) -> Iterator[Any]:
        first = count = self._count
        numbers = (
            itertools.count(first + 1) if self._limit < 0 else range(first + 1, self._limit + 1)
        )
        try:
            for count, row in zip(numbers, rows, strict=False):  # noqa: B007 - read after it
                yield row
        except Exception:
            self._count = count
            raise
        self._count = count
        if count == self._limit:
            self._end = states(count - first)

    def get_state(self) -> State:
        if self._end is not None:
            return {"count": self._count, "input": self._end}
        return super().get_state()

    def set_state(self, state: State) -> None:
        self._end = None
        super().set_state(state)

    def seek(self, position: int) -> None:
        self._count = position
        self._input.seek(position)


@make_iterator.register(Skip)
class SkipIterator(_CountingIterator):
    """Skips the first elements; counts the skipped elements."""

    def __init__(self, node: Skip, context: Context) -> None:
        super().__init__(node, context)
        self._num_to_skip = node.count
        self.has_lazy_rows: bool = self._input.has_lazy_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(limit) if self._skip_prefix() else None
        if chunk is None:
            return None
        return chunk.with_states(part_states("count", self._count, chunk.states))

    def _skip_prefix(self) -> bool:
        """Skip the first elements; return False at the end."""
        while self._num_to_skip < 0 or self._count < self._num_to_skip:
            remaining = (
                _MAX_SKIPPED_AT_ONCE if self._num_to_skip < 0 else self._num_to_skip - self._count
            )
            chunk = self._input.next_chunk(min(remaining, _MAX_SKIPPED_AT_ONCE))
            if chunk is None:
                return False
            self._count += chunk.size
        return True

    def lazy_rows(self) -> LazyRows | None:
        rows_and_states = self._input.lazy_rows() if self._skip_prefix() else None
        return (
            None
            if rows_and_states is None
            else (rows_and_states[0], part_states("count", self._count, rows_and_states[1]))
        )

    def seek(self, position: int) -> None:
        self._count = self._num_to_skip
        if self._num_to_skip >= 0:
            self._input.seek(self._num_to_skip + position)


@make_iterator.register(ShardElements)
class ShardIterator(_CountingIterator):
    """Keeps every n-th element; counts the elements read."""

    def __init__(self, node: ShardElements, context: Context) -> None:
        if node.num_shards == SHARD_HINT:
            raise FailedPreconditionError(
                f"{step_name(node)} has num_shards=SHARD_HINT, which requires a data service "
                "with `headrace.service.ShardingPolicy.HINT`; pass a number of shards"
            )
        super().__init__(node, context)
        self._shards = node.num_shards
        self._index = node.index

    def next_chunk(self, limit: int) -> Chunk | None:
        shards = self._shards
        while True:
            count = self._count
            start = (self._index - count) % shards  # index in the chunk of the next element
            chunk = self._input.next_chunk(start + 1 + (limit - 1) * shards)
            if chunk is None:
                return None
            size = chunk.size
            self._count = count + size
            if start < size:
                indices = range(start, size, shards)
                states = select_states(_counted_states(chunk.states, count), indices, size)
                return chunk.take(np.asarray(indices)).with_states(states)

    def seek(self, position: int) -> None:
        self._count = (position - 1) * self._shards + self._index + 1 if position else 0
        self._input.seek(self._count)


@make_iterator.register(ShardBlocks)
class ShardBlocksIterator(_CountingIterator):
    """Keeps every n-th block; counts the elements read."""

    def __init__(self, node: ShardBlocks, context: Context) -> None:
        super().__init__(node, context)
        self._block = node.block_size
        self._stride = node.num_shards * node.block_size
        self._first = node.index * node.block_size

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            count = self._count
            offset = (count - self._first) % self._stride
            is_in_shard = offset < self._block
            size = min(limit, self._block - offset) if is_in_shard else self._stride - offset
            chunk = self._input.next_chunk(size)
            if chunk is None:
                return None
            self._count = count + chunk.size
            if is_in_shard:
                return chunk.with_states(_counted_states(chunk.states, count))

    def seek(self, position: int) -> None:
        block, offset = divmod(position, self._block)
        self._count = self._first + block * self._stride + offset
        self._input.seek(self._count)


@make_iterator.register(Enumerate)
class EnumerateIterator(_CountingIterator):
    """Pairs elements with consecutive numbers."""

    def __init__(self, node: Enumerate, context: Context) -> None:
        super().__init__(node, context)
        self._start = node.start
        self.has_lazy_rows: bool = self._input.has_lazy_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(limit)
        if chunk is None:
            return None
        count = self._count
        self._count = count + chunk.size
        states = _counted_states(chunk.states, count)
        first = self._start + count
        numbers = np.arange(first, first + chunk.size, dtype=np.int64)
        if chunk.is_columnar:
            return Chunk.of_columns((numbers, chunk.columns()), chunk.size, states, chunk.metadata)
        return Chunk.of_rows(list(zip(numbers, chunk.rows(), strict=True)), states, chunk.metadata)

    def lazy_rows(self) -> LazyRows | None:
        rows_and_states = self._input.lazy_rows()
        return (
            None
            if rows_and_states is None
            else (
                self._enumerate_rows(rows_and_states[0]),
                _counted_states(rows_and_states[1], self._count),
            )
        )

    def _enumerate_rows(self, rows: Iterator[Any]) -> Iterator[Any]:
        numbers = itertools.chain.from_iterable(_number_blocks(self._start + self._count))
        count = 0
        try:
            for count, pair in enumerate(zip(numbers, rows, strict=False), 1):  # noqa: B007 - read after it
                yield pair
        except Exception:
            self._count += count
            raise
        self._count += count

    def seek(self, position: int) -> None:
        self._count = position
        self._input.seek(position)


def _number_blocks(first: int) -> Iterator[list[np.int64]]:
    """Yield blocks of the numbers from `first` on."""
    while True:
        yield list(np.arange(first, first + _BLOCK))
        first += _BLOCK


@make_iterator.register(Repeat)
def _make_repeat(node: Repeat, context: Context) -> ElementIterator:
    if context.split_provider is not None:
        return AssignedRepeatIterator(node, context, context.split_provider)
    input_plan = node.input
    if (
        isinstance(input_plan, Indices)
        and input_plan.size > 0
        and not context.wants_element_numbers
    ):
        return RepeatedIndicesIterator(
            input_plan, node.count, aligns_chunks_to_epochs=context.aligns_chunks_to_epochs
        )
    return RepeatIterator(node, context)


class RepeatIterator(ElementIterator):
    """Makes its input's iterator again for each epoch."""

    def __init__(self, node: Repeat, context: Context) -> None:
        self._node = node
        self._context = context
        self._reset(0)
        self._max_empty_epochs = _MAX_EMPTY_EPOCHS if _reads_shared_job(node.input) else 1

    @property
    def can_read_ahead(self) -> bool:
        return self._input is None or self._input.can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return 1 if self._input is None else self._input.preferred_limit

    def _reset(self, number: int) -> None:
        self._count = self._node.count
        self._num_empty_epochs = 0  # in a row
        self._open(number)

    def _open(self, number: int) -> None:
        self._epoch = number
        self._input: ElementIterator | None = None
        self._is_empty = True  # no element and no error in this epoch so far
        if self._count is None or number < max(self._count, 1):
            self._input = make_iterator(self._node.input, self._context.in_epoch(number))
            self.has_lazy_rows = self._input.has_lazy_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._input is not None and self._count != 0:
            try:
                chunk = self._input.next_chunk(limit)
            except Exception:
                self._is_empty = False
                raise
            if chunk is not None:
                self._is_empty = False
                return tag_part("epoch", self._epoch, chunk)
            self._num_empty_epochs = self._num_empty_epochs + 1 if self._is_empty else 0
            if self._count is None and self._num_empty_epochs >= self._max_empty_epochs:
                return None
            was_free = self._input.can_read_ahead
            self._input.close()
            self._open(self._epoch + 1)
            if was_free and not self.can_read_ahead:
                limit = 1  # the request assumed free reading, but an element may now cost calls
        return None

    def lazy_rows(self) -> LazyRows | None:
        if self._input is not None and self._input.has_lazy_rows and self._count != 0:
            rows_and_states = self._input.lazy_rows()
            if rows_and_states is not None:
                return self._repeat_rows(rows_and_states[0]), part_states(
                    "epoch", self._epoch, rows_and_states[1]
                )
        return super().lazy_rows()

    def _repeat_rows(self, rows: Iterator[Any]) -> Iterator[Any]:
        try:
            for row in rows:
                self._is_empty = False
                yield row
                break
            yield from rows
        except Exception:
            self._is_empty = False
            raise

    def get_state(self) -> State:
        input_state = None if self._input is None else self._input.get_state()
        return {"epoch": self._epoch, "input": input_state}

    def set_state(self, state: State) -> None:
        self.close()
        self._reset(state["epoch"])
        if self._input is not None:
            self._input.set_state(state["input"])
            # Earlier elements are unknown; at worst an empty input is read once more.
            self._is_empty = False

    def seek(self, position: int) -> None:
        size = cardinality(self._node.input)
        number, position = divmod(position, size) if size > 0 else (0, position)
        if number != self._epoch or self._input is None:
            self.close()
            self._reset(number)
        if self._input is not None:
            self._input.seek(position)

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = None


def _reads_shared_job(plan: Node) -> bool:
    """Return whether an epoch may be empty because other clients of a job read all of it.

    Any other input that was empty once stays empty.
    """
    return any(isinstance(node, FromSource) for node in walk(plan))
