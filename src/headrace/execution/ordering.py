"""Iterators of the steps that choose elements without looking at them."""

from __future__ import annotations

import numpy as np

from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.ordering import Enumerate, Repeat, Shard, Skip, Take
from headrace.plan.splits import split_sizes

__all__ = ["EnumerateIterator", "RepeatIterator", "ShardIterator", "SkipIterator", "TakeIterator"]

_MOST_EMPTY_PASSES = 10_000


class _Counting(ElementIterator):
    """An iterator over one input whose own state is a number."""

    def __init__(self, node: Take | Skip | Shard | Enumerate, context: Context) -> None:
        self._input = make_iterator(node.input, context.below(0))
        self._count = 0

    def get_state(self) -> State:
        return {"count": self._count, "input": self._input.get_state()}

    def set_state(self, state: State) -> None:
        self._count = state["count"]
        self._input.set_state(state["input"])

    def close(self) -> None:
        self._input.close()


@make_iterator.register(Take)
class TakeIterator(_Counting):
    """Ends after so many elements; counts those that it gave."""

    def __init__(self, node: Take, context: Context) -> None:
        super().__init__(node, context)
        self._limit = node.count

    def next_chunk(self, limit: int) -> Chunk | None:
        if self._limit >= 0:
            limit = min(limit, self._limit - self._count)
            if limit <= 0:
                return None
        chunk = self._input.next_chunk(limit)
        if chunk is not None:
            self._count += chunk.size
        return chunk


@make_iterator.register(Skip)
class SkipIterator(_Counting):
    """Reads past the first elements; counts those that it left out."""

    def __init__(self, node: Skip, context: Context) -> None:
        super().__init__(node, context)
        self._left_out = node.count

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._left_out < 0 or self._count < self._left_out:
            rest = limit if self._left_out < 0 else self._left_out - self._count
            chunk = self._input.next_chunk(rest)
            if chunk is None:
                return None
            self._count += chunk.size
        return self._input.next_chunk(limit)


@make_iterator.register(Shard)
class ShardIterator(_Counting):
    """Keeps every n-th element; counts those that it read."""

    def __init__(self, node: Shard, context: Context) -> None:
        super().__init__(node, context)
        self._shards = node.num_shards
        self._index = node.index

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            ahead = (self._index - self._count) % self._shards
            chunk = self._input.next_chunk(ahead + 1 + (limit - 1) * self._shards)
            if chunk is None:
                return None
            self._count += chunk.size
            if ahead < chunk.size:
                return chunk.take(np.arange(ahead, chunk.size, self._shards))


@make_iterator.register(Enumerate)
class EnumerateIterator(_Counting):
    """Pairs elements with their numbers; counts them."""

    def __init__(self, node: Enumerate, context: Context) -> None:
        super().__init__(node, context)
        self._start = node.start

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(limit)
        if chunk is None:
            return None
        first = self._start + self._count
        self._count += chunk.size
        numbers = np.arange(first, first + chunk.size, dtype=np.int64)
        if chunk.is_columnar:
            return Chunk.of_columns((numbers, chunk.columns()), chunk.size)
        return Chunk.of_rows(list(zip(numbers, chunk.rows(), strict=True)))


@make_iterator.register(Repeat)
class RepeatIterator(ElementIterator):
    """Makes its input anew for each pass."""

    def __init__(self, node: Repeat, context: Context) -> None:
        self._node = node
        self._context = context.below(0)
        self._count = node.count
        self._pass = 0
        self._input: ElementIterator | None = None
        self._is_empty = True  # nothing came in this pass yet
        self._empty_passes = 0  # in a row
        # Nothing will come of an empty input, however often it is read. But where the input is
        # shared, others may have had all of a pass: of a source dealt out in splits, or read by
        # several clients of a service.
        shared = context.splits is not None or split_sizes(node.input) == ()
        self._patience = _MOST_EMPTY_PASSES if shared else 1

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._count is None or self._pass < self._count:
            if self._input is None:
                self._open()
            assert self._input is not None
            chunk = self._input.next_chunk(limit)
            if chunk is not None:
                self._is_empty = False
                return chunk
            self._input.close()
            self._input = None
            self._pass += 1
            self._empty_passes = self._empty_passes + 1 if self._is_empty else 0
            if self._count is None and self._empty_passes >= self._patience:
                self._count = self._pass
        return None

    def _open(self) -> None:
        self._input = make_iterator(self._node.input, self._context.in_pass(self._pass))
        self._is_empty = True

    def get_state(self) -> State:
        if self._input is None:
            return {"pass": self._pass, "input": None, "empty": True}
        return {"pass": self._pass, "input": self._input.get_state(), "empty": self._is_empty}

    def set_state(self, state: State) -> None:
        self.close()
        self._count = self._node.count
        self._empty_passes = 0
        self._pass = state["pass"]
        if state["input"] is not None:
            self._open()
            assert self._input is not None
            self._input.set_state(state["input"])
            self._is_empty = state["empty"]

    def close(self) -> None:
        input_, self._input = self._input, None
        if input_ is not None:
            input_.close()
