"""Iterators of the steps that look at one element at a time, on the thread that asks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.ownership import owned
from headrace.execution.column_call import call_on_columns
from headrace.execution.context import Context
from headrace.execution.free import Missing
from headrace.execution.intake import Live
from headrace.execution.iterator import (
    END,
    ElementIterator,
    Singles,
    State,
    make_iterator,
)
from headrace.execution.parallel import ParallelMapIterator
from headrace.execution.stage import BLOCK, NOTHING, RowStage, chosen_states
from headrace.plan.elementwise import PLAIN_VERDICTS, Filter, Map, TakeWhile, is_true
from headrace.plan.user_function import UserFunction, map_rows, step_name

__all__ = ["FilterIterator", "MapIterator", "TakeWhileIterator"]


@make_iterator.register(Map)
def _make_map(node: Map, context: Context) -> ElementIterator:
    if node.num_parallel_calls is None or node.output_spec is not None:
        return MapIterator(node, context)
    return ParallelMapIterator(node, context)


class _FunctionStage(RowStage):
    """A step whose function is called with whole columns where that was proved equal."""

    def __init__(
        self,
        node: Map | Filter | TakeWhile,
        context: Context,
        call: UserFunction,
        is_columnar: bool,
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
        while not self._has_ended:
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
        return None


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
        return Chunk.of_columns(result, chunk.size, chunk.states, chunk.column)

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
        states, places = chunk.states, chunk.column_of(start, start + len(results))
        at = (lambda index: states(start + index)) if start else states
        return Chunk.of_rows(results, at, places)

    def step(self, row: Any) -> Any:
        return owned(self.call(row))

    def singles(self) -> Singles | None:
        if self._failure is not None:
            return super().singles()
        live = self._intake.singles()
        return None if live is None else (self._mapped(live), live.states)

    def _mapped(self, live: Live) -> Iterator[Any]:
        fn, count, start = self.call.fn, 0, live.taken
        try:
            for count, row in enumerate(live.rows, 1):
                try:
                    made = owned(fn(*row) if type(row) is tuple else fn(row))
                except BaseException as error:
                    failure = self._blamed(error, live, count, row)
                    raise failure from failure.__cause__
                yield made
        except Exception:
            self._break_off(live, start, count)
            raise
        self._pass_over(count)

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
        return row if is_true(self.call(row)) else NOTHING

    def _go_through(self, chunk: Chunk, limit: int) -> Chunk | None:
        # The loop of `RowStage`, without a call more for each row.
        start, predicate, plain = self._intake.offset, self.call.fn, PLAIN_VERDICTS
        index = start
        kept: list[Any] = []
        origins: list[int] = []
        try:
            for index, row in enumerate(chunk.rows()[start : start + max(limit, BLOCK)], start):
                verdict = predicate(*row) if type(row) is tuple else predicate(row)
                if verdict if type(verdict) in plain else is_true(verdict):
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
        return Chunk.of_rows(kept, states, chunk.column_at(origins))

    def singles(self) -> Singles | None:
        if self._failure is not None:
            return super().singles()
        live = self._intake.singles()
        if live is None:
            return None
        states, after = live.states, [0]

        def states_at(index: int) -> State:
            if index + 1 < len(after):
                return states(after[index + 1] - 1)
            # Before an element that is still looked for, the place is after the one before it.
            return states(after[index])

        return self._kept(live, after), states_at

    def _kept(self, live: Live, after: list[int]) -> Iterator[Any]:
        predicate, plain, count, start = self.call.fn, PLAIN_VERDICTS, 0, live.taken
        append = after.append
        try:
            for count, row in enumerate(live.rows, 1):
                try:
                    verdict = predicate(*row) if type(row) is tuple else predicate(row)
                    if not (verdict if type(verdict) in plain else is_true(verdict)):
                        continue
                except BaseException as error:
                    failure = self._blamed(error, live, count, row)
                    raise failure from failure.__cause__
                append(count)
                yield row
        except Exception:
            self._break_off(live, start, count)
            raise
        self._pass_over(count)


@make_iterator.register(TakeWhile)
class TakeWhileIterator(_FunctionStage):
    """Ends before the first element for which the predicate is false."""

    def __init__(self, node: TakeWhile, context: Context) -> None:
        call = UserFunction(node.predicate, step_name(node), context.contain_exits)
        super().__init__(node, context, call, node.columnar)

    def _on_columns(self, chunk: Chunk) -> Chunk | None:
        keep = call_on_columns(self.call.fn, chunk.columns(), chunk.size)
        # Where it is the last chunk, its elements are gone through one by one.
        return chunk if keep is not None and keep.all() else None

    def step(self, row: Any) -> Any:
        return row if is_true(self.call(row)) else END

    def singles(self) -> Singles | None:
        if self._has_ended or self._failure is not None:
            return super().singles()
        live = self._intake.singles()
        return None if live is None else (self._before_end(live), live.states)

    def _before_end(self, live: Live) -> Iterator[Any]:
        predicate, plain, count, start = self.call.fn, PLAIN_VERDICTS, 0, live.taken
        try:
            for count, row in enumerate(live.rows, 1):
                try:
                    verdict = predicate(*row) if type(row) is tuple else predicate(row)
                    if not (verdict if type(verdict) in plain else is_true(verdict)):
                        self._has_ended = True
                        break
                except BaseException as error:
                    failure = self._blamed(error, live, count, row)
                    raise failure from failure.__cause__
                yield row
        except Exception:
            self._break_off(live, start, count)
            raise
        if self._has_ended:
            live.taken += count - 1  # the place is before what ended it
            self._looked_at += count - 1
            return
        self._pass_over(count)
