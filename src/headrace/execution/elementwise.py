"""Iterators of the steps that look at one element at a time, on the thread that asks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.ownership import owned
from headrace.execution.column_call import call_on_columns
from headrace.execution.context import Context
from headrace.execution.free import Missing
from headrace.execution.iterator import END, ElementIterator, make_iterator, position_of
from headrace.execution.parallel import ParallelMapIterator
from headrace.execution.stage import BLOCK, NOTHING, RowStage, chosen_states
from headrace.plan.elementwise import Filter, Map
from headrace.plan.user_function import UserFunction, map_rows, step_name

__all__ = ["FilterIterator", "MapIterator"]


@make_iterator.register(Map)
def _make_map(node: Map, context: Context) -> ElementIterator:
    if node.num_parallel_calls is None or node.output_spec is not None:
        return MapIterator(node, context)
    return ParallelMapIterator(node, context)


class _FunctionStage(RowStage):
    """A step whose function is called with whole columns where that was proved equal."""

    def __init__(
        self, node: Map | Filter, context: Context, call: UserFunction, is_columnar: bool
    ) -> None:
        input_ = make_iterator(node.input, context)
        if id(node) in context.free:
            input_ = Missing(input_)
        super().__init__(input_, call)
        self._is_columnar = is_columnar
        self.gives_rows = not is_columnar

    @property
    def reads_ahead_freely(self) -> bool:
        return self._is_columnar and self._intake.input.reads_ahead_freely

    @abstractmethod
    def _on_columns(self, chunk: Chunk) -> Chunk | None:
        """Return what becomes of a chunk, perhaps no elements; None: it must be done by rows."""

    def _work(self, limit: int) -> Chunk | None:
        if not self._is_columnar:
            return super()._work(limit)
        while True:
            chunk = self._intake.look(limit)
            if chunk is None:
                return None
            if chunk.is_columnar and chunk is not self._one_by_one:
                start = self._intake.offset
                part = chunk.slice(start, start + limit)
                made = self._on_columns(part)
                if made is not None:
                    self._use(part.size)
                    if made.size:
                        return made
                    continue
                self._one_by_one = chunk
            made = self._go_through(chunk, limit)
            if made is not None or self._failure is not None:
                return made


class MapIterator(_FunctionStage):
    """Applies a function to each element."""

    def __init__(self, node: Map, context: Context) -> None:
        call = UserFunction(node.fn, step_name(node), context.contain_exits)
        super().__init__(node, context, call, node.output_spec is not None)
        self._spec = node.output_spec

    def _on_columns(self, chunk: Chunk) -> Chunk | None:
        result = call_on_columns(self.call.fn, chunk.columns(), chunk.size, self._spec)
        if result is None:
            return None
        return Chunk.of_columns(result, chunk.size, chunk.states, chunk.places)

    def _go_through(self, chunk: Chunk, limit: int) -> Chunk | None:
        start = self._intake.offset
        rows = chunk.rows()
        if start or len(rows) > limit:
            rows = rows[start : start + limit]
        results: list[Any] = []
        try:
            map_rows(self.call, rows, results)
        except BaseException as error:
            self._fail(error, chunk, start + len(results))
            if not results:
                return None
        self._use(len(results))
        states, places = chunk.states, chunk.places_of(slice(start, start + len(results)))
        at = (lambda index: states(start + index)) if start else states
        return Chunk.of_rows(results, at, places)

    def step(self, row: Any) -> Any:
        return owned(self.call(row))

    def next_row(self) -> Any:
        intake, fn = self._intake, self.call.fn
        chunk = intake.chunk
        if chunk is None:
            below = intake.input
            if below.gives_rows:
                row = below.next_row()
                return END if row is END else self._of_row(row)
            chunk = intake.look_ahead(1)
            if chunk is None:
                return END
        if self._failure is not None:
            return super().next_row()
        index = intake.offset
        row = chunk.rows()[index]
        try:
            made = owned(fn(*row) if type(row) is tuple else fn(row))
        except BaseException as error:
            self._fail(error, chunk, index)
            return super().next_row()
        index += 1
        self._looked_at += 1
        if index == chunk.size:
            intake.chunk = None
        else:
            intake.offset = index
        return made

    def _of_row(self, row: Any) -> Any:
        """Return what becomes of an element that the input gave by itself."""
        fn = self.call.fn
        try:
            made = owned(fn(*row) if type(row) is tuple else fn(row))
        except BaseException as error:
            number = position_of(self._intake.input.get_state(), self._looked_at + 1) - 1
            self._looked_at += 1
            raise self.call.blame(error, number) from error
        self._looked_at += 1
        return made

    def skip(self, count: int) -> int:
        self._failure = None
        return self._intake.skip(count)


@make_iterator.register(Filter)
class FilterIterator(_FunctionStage):
    """Keeps the elements for which the predicate is true."""

    def __init__(self, node: Filter, context: Context) -> None:
        call = UserFunction(node.predicate, step_name(node), context.contain_exits)
        super().__init__(node, context, call, node.columnar)

    def _on_columns(self, chunk: Chunk) -> Chunk | None:
        keep = call_on_columns(self.call.fn, chunk.columns(), chunk.size)
        if keep is None:
            return None
        kept = np.flatnonzero(keep)
        states = chosen_states(chunk.states, kept.tolist(), chunk.size)
        return chunk.take(kept).with_states(states)

    def step(self, row: Any) -> Any:
        return row if self.call(row) else NOTHING

    def _go_through(self, chunk: Chunk, limit: int) -> Chunk | None:
        # The loop of `RowStage`, without a call more for each row.
        start, predicate = self._intake.offset, self.call.fn
        index = start
        kept: list[Any] = []
        origins: list[int] = []
        try:
            for index, row in enumerate(chunk.rows()[start : start + max(limit, BLOCK)], start):
                if predicate(*row) if type(row) is tuple else predicate(row):
                    kept.append(row)
                    origins.append(index)
                    if len(kept) == limit:
                        break
            index += 1
        except BaseException as error:
            self._fail(error, chunk, index)
        self._use(index - start)
        if not kept:
            return None
        states = chosen_states(chunk.states, origins, index)
        return Chunk.of_rows(kept, states, chunk.places_of(origins))

    def next_row(self) -> Any:
        intake, predicate = self._intake, self.call.fn
        while self._failure is None:
            chunk = intake.look_ahead(1)
            if chunk is None:
                return END
            rows, index, size = chunk.rows(), intake.offset, chunk.size
            first, keeps = index, False
            try:
                while index < size:
                    row = rows[index]
                    if predicate(*row) if type(row) is tuple else predicate(row):
                        keeps = True
                        break
                    index += 1
            except BaseException as error:
                self._fail(error, chunk, index)
            self._use(index - first + keeps)
            if keeps:
                return row
        return super().next_row()
