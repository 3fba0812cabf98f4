"""Iterators of the steps that process one element at a time, on the consumer's thread."""

from __future__ import annotations

import types
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.ownership import take_ownership
from headrace.element.spec import ArraySpec, Spec
from headrace.element.stack import StackedElement
from headrace.element.structure import flatten
from headrace.element.transpose import map_leaves
from headrace.execution.context import Context
from headrace.execution.input_buffer import LazyRowStream
from headrace.execution.iterator import (
    END,
    ElementIterator,
    LazyRows,
    State,
    make_iterator,
)
from headrace.execution.parallel_map import ParallelMapIterator
from headrace.execution.step_iterator import (
    NO_ELEMENT,
    ROWS_AT_ONCE,
    RowStepIterator,
    UndeliveredInput,
    select_states,
)
from headrace.plan.column_proof import Proof, prove
from headrace.plan.elementwise import PLAIN_RESULT_TYPES, Filter, Map, TakeWhile, is_true
from headrace.plan.user_function import UserFunction, map_rows, step_name

__all__ = [
    "FilterIterator",
    "MapIterator",
    "TakeWhileIterator",
    "call_on_columns",
    "may_raise_on_warnings",
]


@make_iterator.register(Map)
def _make_map(node: Map, context: Context) -> ElementIterator:
    if node.num_parallel_calls is None or node.output_spec is not None:
        return MapIterator(node, context)
    return ParallelMapIterator(node, context)


class _FunctionStepIterator(RowStepIterator):
    """A step that calls its function with whole columns if that is proved equivalent."""

    def __init__(
        self,
        node: Map | Filter | TakeWhile,
        context: Context,
        call: UserFunction,
        is_columnar: bool,
    ) -> None:
        input_ = make_iterator(node.input, context)
        if id(node) in context.unordered_steps:
            input_ = UndeliveredInput(input_)
        super().__init__(input_, call)
        self._is_columnar = is_columnar
        self.has_lazy_rows: bool = not is_columnar

    @property
    def can_read_ahead(self) -> bool:
        return self._is_columnar and self._input_buffer.input.can_read_ahead

    @abstractmethod
    def _apply_to_columns(self, chunk: Chunk) -> Chunk | None:
        """Return the result for a chunk, possibly empty, or None if rows must be used."""

    def _produce(self, limit: int) -> Chunk | None:
        if not self._is_columnar:
            return super()._produce(limit)
        while not self._has_ended:
            chunk = self._input_buffer.peek(limit)
            if chunk is None:
                return None
            if chunk.is_columnar and chunk is not self._failed_chunk:
                start = self._input_buffer.offset
                part = chunk.slice(start, start + limit)
                result = self._apply_to_columns(part)
                if result is not None:
                    self._consume(part.size)
                    if result.size:
                        return result
                    continue
                self._failed_chunk = chunk
            result = self._apply_to_rows(chunk, limit)
            if result is not None or self._pending_error is not None:
                return result
        return None


class MapIterator(_FunctionStepIterator):
    """Applies a function to each element."""

    def __init__(self, node: Map, context: Context, call: UserFunction | None = None) -> None:
        call = call or UserFunction(node.fn, step_name(node), context.contain_exits)
        super().__init__(node, context, call, node.output_spec is not None)
        self._spec = node.output_spec

    def _apply_to_columns(self, chunk: Chunk) -> Chunk | None:
        result = call_on_columns(self.call.fn, chunk.columns(), chunk.size, self._spec)
        if result is None:
            return None
        return Chunk.of_columns(result, chunk.size, chunk.states, chunk.compact_metadata)

    def _apply_to_rows(self, chunk: Chunk, limit: int) -> Chunk | None:
        start = self._input_buffer.offset
        rows = chunk.rows()
        if start or len(rows) > limit:
            rows = rows[start : start + limit]
        results: list[Any] = []
        try:
            map_rows(self.call, rows, results)
        except BaseException as error:
            self._defer_error(error, chunk, start + len(results))
            if not results:
                return None
        self._consume(len(results))
        states, metadata = chunk.states, chunk.slice_compact_metadata(start, start + len(results))
        states_at = (lambda index: states(start + index)) if start else states
        return Chunk.of_rows(results, states_at, metadata)

    def step(self, row: Any) -> Any:
        return take_ownership(self.call(row))

    def lazy_rows(self) -> LazyRows | None:
        if self._pending_error is not None:
            return super().lazy_rows()
        stream = self._input_buffer.lazy_rows()
        return None if stream is None else (self._map_rows(stream), stream.states)

    def _map_rows(self, lazy_rows: LazyRowStream) -> Iterator[Any]:
        fn, count, start = self.call.fn, 0, lazy_rows.num_taken
        try:
            for count, row in enumerate(lazy_rows.rows, 1):
                try:
                    result = take_ownership(fn(*row) if type(row) is tuple else fn(row))
                except BaseException as error:
                    failure = self._wrap_row_error(error, lazy_rows, count, row)
                    raise failure from failure.__cause__
                yield result
        except Exception:
            self._record_row_error(lazy_rows, start, count)
            raise
        self._record_rows(count)

    def skip(self, count: int) -> int:
        self._pending_error = None
        return self._input_buffer.skip(count)


@make_iterator.register(Filter)
class FilterIterator(_FunctionStepIterator):
    """Keeps the elements that satisfy the predicate."""

    def __init__(self, node: Filter, context: Context) -> None:
        call = UserFunction(node.predicate, step_name(node), context.contain_exits)
        super().__init__(node, context, call, node.columnar)

    def _apply_to_columns(self, chunk: Chunk) -> Chunk | None:
        mask = call_on_columns(self.call.fn, chunk.columns(), chunk.size)
        if mask is None:
            return None
        indices = np.flatnonzero(mask)
        states = select_states(chunk.states, indices.tolist(), chunk.size)
        return chunk.take(indices).with_states(states)

    def step(self, row: Any) -> Any:
        return row if is_true(self.call(row)) else NO_ELEMENT

    def _apply_to_rows(self, chunk: Chunk, limit: int) -> Chunk | None:
        # Like the loop of `RowStepIterator`, but with one call less per row.
        start, predicate, plain = self._input_buffer.offset, self.call.fn, PLAIN_RESULT_TYPES
        index = start
        kept: list[Any] = []
        indices: list[int] = []
        try:
            for index, row in enumerate(
                chunk.rows()[start : start + max(limit, ROWS_AT_ONCE)], start
            ):
                predicate_result = predicate(*row) if type(row) is tuple else predicate(row)
                if (
                    predicate_result
                    if type(predicate_result) in plain
                    else is_true(predicate_result)
                ):
                    kept.append(row)
                    indices.append(index)
                    if len(kept) == limit:
                        break
            index += 1
        except BaseException as error:
            self._defer_error(error, chunk, index)
        self._consume(index - start)
        if not kept:
            return None
        states = select_states(chunk.states, indices, index)
        return Chunk.of_rows(kept, states, chunk.take_compact_metadata(indices))

    def lazy_rows(self) -> LazyRows | None:
        if self._pending_error is not None:
            return super().lazy_rows()
        stream = self._input_buffer.lazy_rows()
        if stream is None:
            return None
        states, after = stream.states, [0]

        def states_at(index: int) -> State:
            if index + 1 < len(after):
                return states(after[index + 1] - 1)
            # Before an element that is not found yet, the position is after the previous one.
            return states(after[index])

        return self._filter_rows(stream, after), states_at

    def _filter_rows(self, lazy_rows: LazyRowStream, after: list[int]) -> Iterator[Any]:
        predicate, plain, count, start = self.call.fn, PLAIN_RESULT_TYPES, 0, lazy_rows.num_taken
        append = after.append
        try:
            for count, row in enumerate(lazy_rows.rows, 1):
                try:
                    predicate_result = predicate(*row) if type(row) is tuple else predicate(row)
                    if not (
                        predicate_result
                        if type(predicate_result) in plain
                        else is_true(predicate_result)
                    ):
                        continue
                except BaseException as error:
                    failure = self._wrap_row_error(error, lazy_rows, count, row)
                    raise failure from failure.__cause__
                append(count)
                yield row
        except Exception:
            self._record_row_error(lazy_rows, start, count)
            raise
        self._record_rows(count)


@make_iterator.register(TakeWhile)
class TakeWhileIterator(_FunctionStepIterator):
    """Ends before the first element that fails the predicate."""

    def __init__(self, node: TakeWhile, context: Context) -> None:
        call = UserFunction(node.predicate, step_name(node), context.contain_exits)
        super().__init__(node, context, call, node.columnar)

    def _apply_to_columns(self, chunk: Chunk) -> Chunk | None:
        mask = call_on_columns(self.call.fn, chunk.columns(), chunk.size)
        # The last chunk is processed row by row.
        return chunk if mask is not None and mask.all() else None

    def step(self, row: Any) -> Any:
        return row if is_true(self.call(row)) else END

    def lazy_rows(self) -> LazyRows | None:
        if self._has_ended or self._pending_error is not None:
            return super().lazy_rows()
        stream = self._input_buffer.lazy_rows()
        return None if stream is None else (self._take_rows(stream), stream.states)

    def _take_rows(self, lazy_rows: LazyRowStream) -> Iterator[Any]:
        predicate, plain, count, start = self.call.fn, PLAIN_RESULT_TYPES, 0, lazy_rows.num_taken
        try:
            for count, row in enumerate(lazy_rows.rows, 1):
                try:
                    predicate_result = predicate(*row) if type(row) is tuple else predicate(row)
                    if not (
                        predicate_result
                        if type(predicate_result) in plain
                        else is_true(predicate_result)
                    ):
                        self._has_ended = True
                        break
                except BaseException as error:
                    failure = self._wrap_row_error(error, lazy_rows, count, row)
                    raise failure from failure.__cause__
                yield row
        except Exception:
            self._record_row_error(lazy_rows, start, count)
            raise
        if self._has_ended:
            lazy_rows.num_taken += count - 1  # the position is before the element that ended it
            self._rows_seen += count - 1
            return
        self._record_rows(count)


# --- Calls of user functions with whole columns, if that gives the same elements as rows ----------
#
# Rule 1. The function is proved elementwise for the actual columns and for the current values of
#         outside names; after a name is rebound, it is proved again.
# Rule 2. If the call raises, or returns something the proof did not predict, the result is dropped
#         and the chunk is processed by rows, so that errors are raised in order. This has no side
#         effects, because a proved function has none.
# Rule 3. If a warning would raise, rows are used: NumPy warns when a scalar integer overflows, but
#         not for columns.

_RAISING_MODES = frozenset(["raise", "call", "log"])
"""Modes of `np.errstate` in which a floating-point error runs code or raises."""


def call_on_columns(
    fn: Callable[..., Any], columns: StackedElement, size: int, expected: Spec | None = None
) -> StackedElement | None:
    """Return the results of `fn` for `size` elements as one stacked element, or None to use rows.

    A column that `fn` returns unchanged is returned as the same array; the other arrays are fresh,
    and no two share memory.

    Args:
        fn: The user's function, of one element.
        columns: The elements, stacked.
        size: Number of elements.
        expected: Required spec of the results, or None for any; an axis of None may have any
            length.
    """
    if may_raise_on_warnings():
        return None
    proof = _find_proof(fn, columns)
    if proof is None or not (expected is None or _matches_spec(proof.result, expected)):
        return None
    try:
        result = fn(*columns) if type(columns) is tuple else fn(columns)
    except Exception:
        return None  # rows find the element that fails, if any
    try:
        return _check_result(result, proof.result, size, set())
    except _UnexpectedError:
        return None


def may_raise_on_warnings() -> bool:
    """Return whether arithmetic may raise where NumPy only warns by default."""
    modes = np.geterr().values()
    if not _RAISING_MODES.isdisjoint(modes):
        return True
    filters = warnings.filters
    if "warn" not in modes or "error" not in [entry[0] for entry in filters]:
        return False
    for action, message, category, module, line in filters:
        if issubclass(RuntimeWarning, category):
            if action == "error":
                return True
            if message is None and module is None and not line:
                return False  # the first filter that matches decides
    return False


_proofs: WeakKeyDictionary[types.FunctionType, tuple[Any, Proof | None]] = WeakKeyDictionary()
"""Last proof of each function, with the layout of its columns."""


def _find_proof(fn: Callable[..., Any], columns: StackedElement) -> Proof | None:
    if type(fn) is not types.FunctionType:
        return None
    key: Any
    if type(columns) is np.ndarray:
        if not columns.ndim:
            return None
        key = (columns.dtype, columns.shape[1:])
    else:
        leaves, structure = flatten(columns)
        if any(type(leaf) is not np.ndarray or not leaf.ndim for leaf in leaves):
            return None
        key = (structure, [(leaf.dtype, leaf.shape[1:]) for leaf in leaves])
    known = _proofs.get(fn)
    if known is not None and known[0] == key:
        proof = known[1]
        if proof is not None and proof.holds_for(fn):
            return proof
    proof = prove(fn, map_leaves(_row_spec, columns))
    _proofs[fn] = (key, proof)
    return proof


def _row_spec(column: np.ndarray[Any, Any]) -> ArraySpec | None:
    # Objects are bytes and str, which proofs do not cover.
    return None if column.dtype.hasobject else ArraySpec(column.shape[1:], column.dtype)


def _matches_spec(found: Spec, expected: Spec) -> bool:
    if found == expected:
        return True
    leaves, structure = flatten(found)
    others, other_structure = flatten(expected)
    return structure == other_structure and all(
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(n in (m, None) for m, n in zip(a.shape, b.shape, strict=True))
        for a, b in zip(leaves, others, strict=True)
    )


class _UnexpectedError(Exception):
    """The result differs from the proof's prediction."""


def _check_result(result: Any, spec: Spec, size: int, seen: set[int]) -> StackedElement:
    """Return the result in fresh containers, with each array only once."""
    if type(result) is not (np.ndarray if isinstance(spec, ArraySpec) else type(spec)):
        raise _UnexpectedError
    if isinstance(spec, ArraySpec):
        if result.shape != (size, *spec.shape) or result.dtype != spec.dtype:
            raise _UnexpectedError
        if id(result) in seen:
            return result.copy()
        seen.add(id(result))
        return result
    if len(result) != len(spec):
        raise _UnexpectedError
    if type(spec) is dict:
        if list(result) != list(spec):
            raise _UnexpectedError
        return {key: _check_result(result[key], part, size, seen) for key, part in spec.items()}
    return tuple([_check_result(a, b, size, seen) for a, b in zip(result, spec, strict=True)])
