"""Iterators over what a plan begins with: numbers, and elements read by their numbers."""

from __future__ import annotations

from functools import partial

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.structure import flatten
from headrace.execution.context import Context
from headrace.execution.dealt import DealtLeaf
from headrace.execution.iterator import (
    ElementIterator,
    State,
    make_iterator,
)
from headrace.execution.places import of_positions
from headrace.execution.stage import Stage
from headrace.plan.combined_sources import decided, draws
from headrace.plan.elements import Gather, Indices
from headrace.plan.node import Node
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality

__all__ = ["GatherIterator", "IndexPart", "IndicesIterator", "RepeatedIndices", "RowsIterator"]


class _Numbered(ElementIterator):
    """What stands over numbers, an element each; its state is how many were passed."""

    def __init__(self, indices: Indices, context: Context) -> None:
        self._wants_places = context.wants_places
        self._first = indices.start
        self._size = indices.size
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
class IndicesIterator(_Numbered):
    """Counts from the first; its state is how many were counted."""

    def next_chunk(self, limit: int) -> Chunk | None:
        start = self._next
        stop = start + limit if self._size == INFINITE else min(start + limit, self._size)
        if stop <= start:
            return None
        self._next = stop
        numbers = np.arange(self._first + start, self._first + stop)
        places = of_positions(start, stop - start) if self._wants_places else None
        return Chunk.of_columns(numbers, stop - start, start.__add__, places)

    def seek(self, position: int) -> None:
        self._next = position


class RepeatedIndices(ElementIterator):
    """Counts the same numbers in each pass: what `RepeatIterator` gives, and its states.

    A chunk has several passes where these are short: to make one for each would cost many times
    what the elements of a small dataset do.

    Args:
        indices: The numbers, of which there are some.
        count: How many passes; None: without end.
        parted: Whether a chunk ends with its pass all the same.
    """

    def __init__(self, indices: Indices, count: int | None, *, parted: bool = False) -> None:
        self._first, self._size = indices.start, indices.size
        self._count = count
        self._is_parted = parted
        self._pass = self._at = 0  # numbers of this pass that were counted

    def next_chunk(self, limit: int) -> Chunk | None:
        size = self._size
        if self._at == size:
            self._pass, self._at = self._pass + 1, 0
        if self._count is not None and self._pass >= self._count:
            return None
        first, at, number = self._first, self._at, self._pass
        stop = at + limit
        if self._is_parted or limit < 2 * size:
            stop = min(stop, size)
        elif self._count is not None:
            stop = min(stop, (self._count - number) * size)
        numbers = np.arange(at, stop)
        if stop > size:
            numbers %= size
        if first:
            numbers += first
        passes, self._at = self._after(stop)
        self._pass = number + passes
        return Chunk.of_columns(numbers, stop - at, partial(self._state, number, at))

    def _after(self, position: int) -> tuple[int, int]:
        """Return the pass of the number before a position, and what of it is counted then."""
        passes, last = divmod(position - 1, self._size)
        return passes, last + 1

    def _state(self, number: int, at: int, index: int) -> State:
        passes, counted = self._after(at + index) if index else (0, at)
        return {"pass": number + passes, "input": counted}

    def get_state(self) -> State:
        return {"pass": self._pass, "input": self._at}

    def set_state(self, state: State) -> None:
        self._pass, self._at = state["pass"], state["input"] or 0

    def seek(self, position: int) -> None:
        self._pass, self._at = divmod(position, self._size)


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
        chunk = self._read(start, limit)
        if chunk is None:
            return None
        self._position = start + chunk.size
        if self._wants_places:
            chunk = chunk.with_places(of_positions(start, chunk.size))
        return chunk.with_states(start.__add__)

    def _read(self, start: int, limit: int) -> Chunk | None:
        """Return the elements from a position on; one that fails is passed over as it is raised."""
        while True:
            if not self._is_there:
                self._steps.seek(start)
            self._is_there = False  # unless it goes well
            try:
                chunk = self._steps.next_chunk(limit)
            except Exception:
                if limit > 1:  # which of them it was shows one by one
                    limit = 1
                    continue
                self._position = start + 1
                raise
            self._is_there = True
            return chunk

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


def index_part_iterator(node: Node, context: Context) -> ElementIterator:
    if context.dealer is not None:
        return DealtLeaf(node, context)
    if isinstance(node, Indices):  # each number is its own position
        return make_iterator(node, context)
    return IndexPart(node, context)


@make_iterator.register(Gather)
def _make_gather(node: Gather, context: Context) -> ElementIterator:
    lends = id(node) in context.lending  # of the plan's own node, not of one that replaces it
    if draws(node):
        source = decided(node.source, context.iteration_entropy)
        node = node.with_parameters(source=source)
    if context.dealer is None and isinstance(node.input, Indices) and not context.is_watched:
        return RowsIterator(node, node.input, context, lends=lends)
    return GatherIterator(node, context, lends=lends)


class RowsIterator(_Numbered):
    """Fetches the elements of a source in order: a `Gather` over numbers, and most datasets.

    The state is that of the numbers: how many elements were passed.
    """

    def __init__(self, node: Gather, indices: Indices, context: Context, *, lends: bool) -> None:
        super().__init__(indices, context)
        source = node.source
        self._read_run = source.lend_run if lends else source.gather_run
        self._is_free = not node.source.runs_user_code
        #: Elements before this one could not be fetched together.
        self._one_by_one = 0

    @property
    def reads_ahead_freely(self) -> bool:
        return self._is_free

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
                columns = self._read_run(first + start, first + stop)
            except Exception:
                if stop - start > 1:
                    self._one_by_one = stop
                    continue
                self._next = stop
                raise
            self._next = stop
            places = of_positions(start, stop - start) if self._wants_places else None
            return Chunk.of_columns(columns, stop - start, start.__add__, places)


class GatherIterator(Stage):
    """Fetches the elements at the indices of its input, a chunk at once."""

    def __init__(self, node: Gather, context: Context, *, lends: bool) -> None:
        source = node.source
        if lends and source.lends_runs:
            context = context.with_passes_apart()
        super().__init__(index_part_iterator(node.input, context))
        self._read = source.lend if lends else source.gather
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
                made = [self._read(row) for row in rows]
                return Chunk.of_rows(made, chunk.states, chunk.column)
        made = self._read(chunk.columns())
        return Chunk.of_columns(made, chunk.size, chunk.states, chunk.column)

    def skip(self, count: int) -> int:
        self._failure = None
        return self._intake.skip(count)
