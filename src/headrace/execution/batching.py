"""Iterators of the steps that join elements into batches and take batches apart."""

from __future__ import annotations

from headrace.element.chunk import Chunk
from headrace.element.chunk import concatenate as concatenate_chunks
from headrace.element.spec import spec_of, unbatched
from headrace.element.stack import count
from headrace.element.tree import map_leaves
from headrace.execution.context import Context
from headrace.execution.intake import Intake
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.batching import Batch, Unbatch

__all__ = ["BatchIterator", "UnbatchIterator"]

_MOST_ELEMENTS = 1 << 16


@make_iterator.register(Batch)
class BatchIterator(ElementIterator):
    """Stacks consecutive elements. A batch is fresh memory that its receiver owns."""

    def __init__(self, node: Batch, context: Context) -> None:
        self._size = node.size
        self._drop_remainder = node.drop_remainder
        self._intake = Intake(make_iterator(node.input, context.below(0)))
        self._parts: list[Chunk] = []  # of a batch that an error interrupted
        self._have = 0
        self._before: State = None  # where the elements in `_parts` came from

    def next_chunk(self, limit: int) -> Chunk | None:
        size = self._size
        if not self._have:
            if limit > 1 and self._intake.in_hand == 0:
                whole = self._several(limit)
                if whole is not None:
                    return whole
            self._before = self._intake.get_state()
        while self._have < size:
            part = self._intake.take(size - self._have)
            if part is None:
                break
            self._parts.append(part)
            self._have += part.size
        if not self._have or (self._drop_remainder and self._have < size):
            self._parts, self._have = [], 0
            return None
        parts, self._parts, self._have = self._parts, [], 0
        return Chunk.of_rows([concatenate_chunks(parts).columns()])

    def _several(self, limit: int) -> Chunk | None:
        """Return several whole batches at once, if as many elements come as one block."""
        size = self._size
        if limit * size > _MOST_ELEMENTS:
            limit = max(1, _MOST_ELEMENTS // size)
        chunk = self._intake.take(limit * size)
        if chunk is None:
            return None
        whole = chunk.size // size
        if not whole or not chunk.is_columnar:
            self._intake.put_back(chunk.size)
            return None
        self._intake.put_back(chunk.size - whole * size)
        columns = chunk.columns() if chunk.size == whole * size else None
        if columns is None:
            columns = chunk.slice(0, whole * size).columns()
        shaped = map_leaves(lambda leaf: leaf.reshape(whole, size, *leaf.shape[1:]), columns)
        return Chunk.of_columns(shaped, whole)

    def get_state(self) -> State:
        return self._before if self._have else self._intake.get_state()

    def set_state(self, state: State) -> None:
        self._parts, self._have = [], 0
        self._intake.set_state(state)

    def close(self) -> None:
        self._parts, self._have = [], 0
        self._intake.close()


@make_iterator.register(Unbatch)
class UnbatchIterator(ElementIterator):
    """Yields the rows of its input's elements."""

    def __init__(self, node: Unbatch, context: Context) -> None:
        self._input = make_iterator(node.input, context.below(0))
        self._begin()

    def _begin(self) -> None:
        self._before: State = None  # of the input, before the element in hand
        self._batch: Chunk | None = None
        self._offset = 0

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._batch is None or self._offset >= self._batch.size:
            before = self._input.get_state()
            chunk = self._input.next_chunk(1)
            if chunk is None:
                self._begin()
                return None
            element = chunk.rows()[0]
            unbatched(spec_of(element))  # refuses what has no first axis
            self._before, self._offset = before, 0
            self._batch = Chunk.of_columns(element, count(element))
        start = self._offset
        self._offset = min(start + limit, self._batch.size)
        return self._batch.slice(start, self._offset)

    def get_state(self) -> State:
        if self._batch is None or self._offset >= self._batch.size:
            return {"offset": 0, "input": self._input.get_state()}
        return {"offset": self._offset, "input": self._before}

    def set_state(self, state: State) -> None:
        self._begin()
        self._input.set_state(state["input"])
        offset = state["offset"]
        while offset:
            passed = self.next_chunk(offset)
            if passed is None:
                break
            offset -= passed.size

    def close(self) -> None:
        self._begin()
        self._input.close()
