"""Iterators of the steps that choose elements without looking at them.

Each works in the index part of a plan, where it is sought to a position (`seek`), and over other
steps, where its state is a count of its own and its input's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from itertools import count as counting
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.errors import FailedPreconditionError
from headrace.execution.context import Context
from headrace.execution.dealt import DealtRepeat
from headrace.execution.elements import RepeatedIndices
from headrace.execution.iterator import ElementIterator, Singles, State, make_iterator
from headrace.execution.stage import chosen_states, in_part, states_in
from headrace.plan.elements import FromSource, Indices
from headrace.plan.node import Node
from headrace.plan.ordering import SHARD_HINT, Enumerate, Repeat, Shard, ShardBlocks, Skip, Take
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

_MOST_EMPTY_PASSES = 10_000
_MOST_LEFT_OUT = 1 << 16
"""Elements that `skip` reads at once."""
_BLOCK = 64
"""Numbers that are made at once for single elements."""


class _Counting(ElementIterator):
    """An iterator over one input whose own state is a number."""

    def __init__(
        self, node: Take | Skip | Shard | ShardBlocks | Enumerate, context: Context
    ) -> None:
        self._input = make_iterator(node.input, context)
        self._count = 0

    @property
    def reads_ahead_freely(self) -> bool:
        return self._input.reads_ahead_freely

    @property
    def at_hand(self) -> int:
        return self._input.at_hand

    def get_state(self) -> State:
        return {"count": self._count, "input": self._input.get_state()}

    def set_state(self, state: State) -> None:
        self._count = state["count"]
        self._input.set_state(state["input"])

    def close(self) -> None:
        self._input.close()


def _counted(states: States, count: int) -> States:
    """Return the states before elements that are number `count` and following."""
    return lambda index: {"count": count + index, "input": states(index)}


@make_iterator.register(Take)
class TakeIterator(_Counting):
    """Ends after so many elements; counts those that it gave."""

    def __init__(self, node: Take, context: Context) -> None:
        super().__init__(node, context)
        self._limit = node.count
        self.gives_rows = self._input.gives_rows
        #: That of the input, where the last elements were single ones: it does not stand there.
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
        return chunk.with_states(_counted(chunk.states, count))

    def singles(self) -> Singles | None:
        count = self._count
        if 0 <= self._limit <= count:
            return None
        got = self._input.singles()
        return None if got is None else (self._taken(*got), _counted(got[1], count))

    def _taken(self, rows: Iterator[Any], states: States) -> Iterator[Any]:
        first = count = self._count
        numbers = counting(first + 1) if self._limit < 0 else range(first + 1, self._limit + 1)
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
class SkipIterator(_Counting):
    """Reads past the first elements; counts those that it left out."""

    def __init__(self, node: Skip, context: Context) -> None:
        super().__init__(node, context)
        self._left_out = node.count
        self.gives_rows = self._input.gives_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(limit) if self._is_past() else None
        if chunk is None:
            return None
        return chunk.with_states(states_in("count", self._count, chunk.states))

    def _is_past(self) -> bool:
        """Read past the elements that are left out; False: there are no others."""
        while self._left_out < 0 or self._count < self._left_out:
            rest = _MOST_LEFT_OUT if self._left_out < 0 else self._left_out - self._count
            chunk = self._input.next_chunk(min(rest, _MOST_LEFT_OUT))
            if chunk is None:
                return False
            self._count += chunk.size
        return True

    def singles(self) -> Singles | None:
        got = self._input.singles() if self._is_past() else None
        return None if got is None else (got[0], states_in("count", self._count, got[1]))

    def seek(self, position: int) -> None:
        self._count = self._left_out
        if self._left_out >= 0:
            self._input.seek(self._left_out + position)


@make_iterator.register(Shard)
class ShardIterator(_Counting):
    """Keeps every n-th element; counts those that it read."""

    def __init__(self, node: Shard, context: Context) -> None:
        if node.num_shards == SHARD_HINT:
            raise FailedPreconditionError(
                f"{step_name(node)} has SHARD_HINT in place of a number of shards, which works "
                "over a data service with `headrace.service.ShardingPolicy.HINT` processing mode "
                "alone; write the number of shards"
            )
        super().__init__(node, context)
        self._shards = node.num_shards
        self._index = node.index

    def next_chunk(self, limit: int) -> Chunk | None:
        shards = self._shards
        while True:
            count = self._count
            ahead = (self._index - count) % shards
            chunk = self._input.next_chunk(ahead + 1 + (limit - 1) * shards)
            if chunk is None:
                return None
            size = chunk.size
            self._count = count + size
            if ahead < size:
                kept = range(ahead, size, shards)
                states = chosen_states(_counted(chunk.states, count), kept, size)
                return chunk.take(np.asarray(kept)).with_states(states)

    def seek(self, position: int) -> None:
        self._count = (position - 1) * self._shards + self._index + 1 if position else 0
        self._input.seek(self._count)


@make_iterator.register(ShardBlocks)
class ShardBlocksIterator(_Counting):
    """Keeps every n-th block; counts the elements that it read."""

    def __init__(self, node: ShardBlocks, context: Context) -> None:
        super().__init__(node, context)
        self._block = node.block
        self._stride = node.num_shards * node.block
        self._first = node.index * node.block

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            count = self._count
            at = (count - self._first) % self._stride
            inside = at < self._block
            wanted = min(limit, self._block - at) if inside else self._stride - at
            chunk = self._input.next_chunk(wanted)
            if chunk is None:
                return None
            self._count = count + chunk.size
            if inside:
                return chunk.with_states(_counted(chunk.states, count))

    def seek(self, position: int) -> None:
        block, within = divmod(position, self._block)
        self._count = self._first + block * self._stride + within
        self._input.seek(self._count)


@make_iterator.register(Enumerate)
class EnumerateIterator(_Counting):
    """Pairs elements with their numbers; counts them."""

    def __init__(self, node: Enumerate, context: Context) -> None:
        super().__init__(node, context)
        self._start = node.start
        self.gives_rows = self._input.gives_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(limit)
        if chunk is None:
            return None
        count = self._count
        self._count = count + chunk.size
        states = _counted(chunk.states, count)
        first = self._start + count
        numbers = np.arange(first, first + chunk.size, dtype=np.int64)
        if chunk.is_columnar:
            return Chunk.of_columns((numbers, chunk.columns()), chunk.size, states, chunk.places)
        return Chunk.of_rows(list(zip(numbers, chunk.rows(), strict=True)), states, chunk.places)

    def singles(self) -> Singles | None:
        got = self._input.singles()
        return None if got is None else (self._numbered(got[0]), _counted(got[1], self._count))

    def _numbered(self, rows: Iterator[Any]) -> Iterator[Any]:
        numbers = chain.from_iterable(_blocks(self._start + self._count))
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


def _blocks(first: int) -> Iterator[list[np.int64]]:
    """Yield the numbers from `first` on."""
    while True:
        yield list(np.arange(first, first + _BLOCK))
        first += _BLOCK


@make_iterator.register(Repeat)
def _make_repeat(node: Repeat, context: Context) -> ElementIterator:
    if context.dealer is not None:
        return DealtRepeat(node, context, context.dealer)
    of = node.input
    if isinstance(of, Indices) and of.size > 0 and not context.wants_places:
        return RepeatedIndices(of, node.count, parted=context.parts_passes)
    return RepeatIterator(node, context)


class RepeatIterator(ElementIterator):
    """Makes its input again for each pass."""

    def __init__(self, node: Repeat, context: Context) -> None:
        self._node = node
        self._context = context
        self._begin(0)
        self._patience = _MOST_EMPTY_PASSES if _is_shared(node.input) else 1

    @property
    def reads_ahead_freely(self) -> bool:
        return self._input is None or self._input.reads_ahead_freely

    @property
    def at_hand(self) -> int:
        return 1 if self._input is None else self._input.at_hand

    def _begin(self, number: int) -> None:
        self._count = self._node.count
        self._empty_passes = 0  # in a row
        self._open(number)

    def _open(self, number: int) -> None:
        self._pass = number
        self._input: ElementIterator | None = None
        self._is_empty = True  # nothing came in this pass yet, and no error
        if self._count is None or number < max(self._count, 1):
            self._input = make_iterator(self._node.input, self._context.in_pass(number))
            self.gives_rows = self._input.gives_rows

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._input is not None and self._count != 0:
            try:
                chunk = self._input.next_chunk(limit)
            except Exception:
                self._is_empty = False
                raise
            if chunk is not None:
                self._is_empty = False
                return in_part("pass", self._pass, chunk)
            self._empty_passes = self._empty_passes + 1 if self._is_empty else 0
            if self._count is None and self._empty_passes >= self._patience:
                return None
            was_free = self._input.reads_ahead_freely
            self._input.close()
            self._open(self._pass + 1)
            if was_free and not self.reads_ahead_freely:
                limit = 1  # more may not have been meant, now that it may cost calls
        return None

    def singles(self) -> Singles | None:
        if self._input is not None and self._input.gives_rows and self._count != 0:
            got = self._input.singles()
            if got is not None:
                return self._passed(got[0]), states_in("pass", self._pass, got[1])
        return super().singles()

    def _passed(self, rows: Iterator[Any]) -> Iterator[Any]:
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
        place = None if self._input is None else self._input.get_state()
        return {"pass": self._pass, "input": place}

    def set_state(self, state: State) -> None:
        self.close()
        self._begin(state["pass"])
        if self._input is not None:
            self._input.set_state(state["input"])
            # What was passed is not known; at worst an empty input is read once more.
            self._is_empty = False

    def seek(self, position: int) -> None:
        size = cardinality(self._node.input)
        number, position = divmod(position, size) if size > 0 else (0, position)
        if number != self._pass or self._input is None:
            self.close()
            self._begin(number)
        if self._input is not None:
            self._input.seek(position)

    def close(self) -> None:
        if self._input is not None:
            self._input.close()
        self._input = None


def _is_shared(plan: Node) -> bool:
    """Say whether others may have had all of a pass: several clients read from one service.

    Nothing comes of any other input that was empty once, however often it is read.
    """
    return any(isinstance(node, FromSource) for node in walk(plan))
