"""Iterators over sources: split by split, or gathered by index."""

from __future__ import annotations

import numpy as np

from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.elements import FromSource, Gather
from headrace.plan.source import Reader

__all__ = ["GatherIterator", "SourceIterator"]


@make_iterator.register(FromSource)
class SourceIterator(ElementIterator):
    """Reads a source's splits in turn."""

    def __init__(self, node: FromSource, context: Context) -> None:
        self._source = node.source
        number = context.source_numbers.get(id(node))
        self._deal = None
        if context.splits is not None and number is not None:
            provider, repetition = context.splits, context.epoch
            self._deal = lambda: provider.next_split(number, repetition)
        self._reader: Reader | None = None
        #: None: not begun. "end": over. Else the split that the reader reads.
        self._split: tuple[int, int] | str | None = None

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._split != "end":
            if self._reader is None:
                split = self._next_split()
                if split is None:
                    self._split = "end"
                    break
                self._split = split
                self._reader = self._source.open(*split)
            chunk = self._reader.read(limit)
            if chunk is not None:
                return chunk
            self._reader.close()
            self._reader = None
        return None

    def _next_split(self) -> tuple[int, int] | None:
        if self._deal is not None:
            return self._deal()
        return (0, self._source.size) if self._split is None else None

    def get_state(self) -> State:
        if self._reader is None:
            # Between splits there is nothing to come of the one before.
            return "end" if self._split is not None else None
        assert isinstance(self._split, tuple)
        return [*self._split, self._reader.get_position()]

    def set_state(self, state: State) -> None:
        self.close()
        if isinstance(state, list):
            start, stop, position = state
            self._split = (start, stop)
            self._reader = self._source.open(start, stop, position)
        else:
            self._split = state

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


@make_iterator.register(Gather)
class GatherIterator(ElementIterator):
    """Fetches the elements at the indices of its input, a chunk at once."""

    def __init__(self, node: Gather, context: Context) -> None:
        self._source = node.source
        self._input = make_iterator(node.input, context.below(0))

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(limit)
        if chunk is None:
            return None
        if not chunk.is_columnar:
            rows = chunk.rows()
            if isinstance(rows[0], np.ndarray):
                return Chunk.of_rows([self._source.gather(row) for row in rows])
        return Chunk.of_columns(self._source.gather(chunk.columns()), chunk.size)

    def get_state(self) -> State:
        return self._input.get_state()

    def set_state(self, state: State) -> None:
        self._input.set_state(state)

    def close(self) -> None:
        self._input.close()
