"""Iterators of the steps that look at one element at a time, on the thread that asks."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.tree import normalize
from headrace.execution.context import Context
from headrace.execution.intake import Intake
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.parallel import ParallelMapIterator
from headrace.execution.user_function import user_error
from headrace.plan.elementwise import Filter, Map

__all__ = ["FilterIterator", "MapIterator", "map_rows"]


@make_iterator.register(Map)
def _make_map(node: Map, context: Context) -> ElementIterator:
    if node.num_parallel_calls is None or node.output_spec is not None:
        return MapIterator(node, context)
    return ParallelMapIterator(node, context, map_rows)


def map_rows(node: Map, rows: list[Any], position: int) -> tuple[list[Any], Exception | None]:
    """Apply the function to rows until one fails; return the results, and the error if any."""
    results: list[Any] = []
    append, fn = results.append, node.fn
    try:
        if rows and isinstance(rows[0], tuple):
            for row in rows:
                append(normalize(fn(*row) if isinstance(row, tuple) else fn(row)))
        else:
            for row in rows:
                append(normalize(fn(row) if not isinstance(row, tuple) else fn(*row)))
    except Exception as error:
        place = f"map ({node.location})" if node.location else "map"
        return results, user_error(error, fn, place, position + len(results))
    return results, None


@make_iterator.register(Filter)
class FilterIterator(ElementIterator):
    """Keeps the elements for which the predicate is true."""

    def __init__(self, node: Filter, context: Context) -> None:
        self._node = node
        self._intake = Intake(make_iterator(node.input, context.below(0)))
        self._position = 0

    def next_chunk(self, limit: int) -> Chunk | None:
        while True:
            chunk = self._intake.take(limit)
            if chunk is None:
                return None
            if self._node.columnar and chunk.is_columnar:
                columns = chunk.columns()
                predicate = self._node.predicate
                keep = predicate(*columns) if isinstance(columns, tuple) else predicate(columns)
                kept = chunk.take(np.flatnonzero(keep))
                self._position += chunk.size
            else:
                kept = self._by_row(chunk)
            if kept.size:
                return kept

    def _by_row(self, chunk: Chunk) -> Chunk:
        predicate, kept, seen = self._node.predicate, [], 0
        try:
            for row in chunk.rows():
                seen += 1
                verdict = predicate(*row) if isinstance(row, tuple) else predicate(row)
                if verdict:
                    kept.append(row)
        except Exception as error:
            if seen > 1:
                # The failing element is looked at again when its turn to raise comes.
                self._intake.put_back(chunk.size - seen + 1)
                self._position += seen - 1
                return Chunk.of_rows(kept)
            self._intake.put_back(chunk.size - 1)
            self._position += 1
            place = f"filter ({self._node.location})" if self._node.location else "filter"
            raise user_error(error, predicate, place, self._position - 1) from error
        self._position += chunk.size
        return Chunk.of_rows(kept)

    def get_state(self) -> State:
        return {"position": self._position, "input": self._intake.get_state()}

    def set_state(self, state: State) -> None:
        self._position = state["position"]
        self._intake.set_state(state["input"])

    def close(self) -> None:
        self._intake.close()


class MapIterator(ElementIterator):
    """Applies a function to each element, or to whole columns where that was proved equal."""

    def __init__(self, node: Map, context: Context) -> None:
        self._node = node
        self._intake = Intake(make_iterator(node.input, context.below(0)))
        self._is_columnar = node.output_spec is not None
        self._position = 0

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._intake.take(limit)
        if chunk is None:
            return None
        if self._is_columnar and chunk.is_columnar:
            columns = chunk.columns()
            fn = self._node.fn
            result = fn(*columns) if isinstance(columns, tuple) else fn(columns)
            self._position += chunk.size
            return Chunk.of_columns(result, chunk.size)
        results, error = map_rows(self._node, chunk.rows(), self._position)
        if error is not None:
            if not results:
                self._intake.put_back(chunk.size - 1)
                self._position += 1
                raise error
            # The failing element is tried again when its turn to raise comes.
            self._intake.put_back(chunk.size - len(results))
        self._position += len(results)
        return Chunk.of_rows(results)

    def get_state(self) -> State:
        return {"position": self._position, "input": self._intake.get_state()}

    def set_state(self, state: State) -> None:
        self._position = state["position"]
        self._intake.set_state(state["input"])

    def close(self) -> None:
        self._intake.close()
