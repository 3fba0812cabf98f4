"""Iterators of the steps that look at one element at a time, on the thread that asks."""

from __future__ import annotations

import types
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.ownership import owned
from headrace.element.spec import ArraySpec, Spec
from headrace.element.stack import Stacked
from headrace.element.structure import flatten
from headrace.element.transpose import map_leaves
from headrace.execution.context import Context
from headrace.execution.intake import Live
from headrace.execution.iterator import (
    END,
    ElementIterator,
    Singles,
    State,
    make_iterator,
)
from headrace.execution.parallel import ParallelMapIterator
from headrace.execution.stage import BLOCK, NOTHING, Missing, RowStage, chosen_states
from headrace.plan.column_proof import Proof, prove
from headrace.plan.elementwise import PLAIN_VERDICTS, Filter, Map, TakeWhile, is_true
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


# --- Call a user's function with whole columns, where that gives the same elements as rows --------
#
# Rule 1. The function was proved elementwise for these very columns and for what it reads from
#         outside at this moment; a name that was rebound since is proved again.
# Rule 2. Whatever the call raises, and whatever it returns that the proof did not say, is dropped:
#         the chunk is done again by rows, so that an error is raised in its place. That is free of
#         effects, for a function that was proved has none.
# Rule 3. Where a warning would raise, rows it is: NumPy warns when a scalar integer overflows, and
#         is silent about columns.

_RAISING = frozenset(["raise", "call", "log"])
"""Modes of `np.errstate` in which a floating-point error runs code or raises."""


def call_on_columns(
    fn: Callable[..., Any], columns: Stacked, size: int, expected: Spec | None = None
) -> Stacked | None:
    """Return the results of `fn` for `size` elements as one stacked element, or None: do rows.

    A column that `fn` returns as it is comes back as the same array; the other arrays are fresh,
    and no two share memory.

    Args:
        fn: The user's function, of one element.
        columns: The elements, stacked.
        size: The number of elements.
        expected: The spec of the results, where only those are of use; an axis of None may have
            any length.
    """
    if may_raise_on_warnings():
        return None
    proof = _proof_of(fn, columns)
    if proof is None or not (expected is None or _agree(proof.result, expected)):
        return None
    try:
        result = fn(*columns) if type(columns) is tuple else fn(columns)
    except Exception:
        return None  # rows find the element at fault, if it is one
    try:
        return _checked(result, proof.result, size, set())
    except _UnexpectedError:
        return None


def may_raise_on_warnings() -> bool:
    """Say whether arithmetic may raise here for a value that NumPy only warns of by default."""
    modes = np.geterr().values()
    if not _RAISING.isdisjoint(modes):
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
"""The last proof of each function, and for which columns it was."""


def _proof_of(fn: Callable[..., Any], columns: Stacked) -> Proof | None:
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
    # Objects are bytes and str, which are not proved about.
    return None if column.dtype.hasobject else ArraySpec(column.shape[1:], column.dtype)


def _agree(found: Spec, expected: Spec) -> bool:
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
    """A result is not what was proved."""


def _checked(result: Any, spec: Spec, size: int, seen: set[int]) -> Stacked:
    """Return the result in fresh containers, no array twice."""
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
        return {key: _checked(result[key], part, size, seen) for key, part in spec.items()}
    return tuple([_checked(a, b, size, seen) for a, b in zip(result, spec, strict=True)])
