"""Iterators over windows, which become datasets that a function makes, or padded batches."""

from __future__ import annotations

import operator
from bisect import bisect_right
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.pad import Padding, fill_unknown_lengths
from headrace.element.spec import spec_of
from headrace.element.stack import StackedElement, stack
from headrace.element.structure import Element
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.context import Context
from headrace.execution.element_numbers import IdColumn, nest_ids
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.window_collector import KeyedWindow, WindowCollector
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.traverse import element_spec
from headrace.plan.user_function import UserFunction, step_name
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.sources.memory import ElementListSource

__all__ = ["BucketIterator", "GroupByWindowIterator"]

_MAX_ELEMENTS_AT_ONCE = 1024
"""Number of elements to request from a dataset that reads ahead freely."""


class _OpenWindow:
    """The open dataset that a function returned for a window."""

    def __init__(
        self, key: int, ordinals: list[int], element_id: IdColumn | None, iterator: ElementIterator
    ) -> None:
        self.key = key
        self.ordinals = ordinals
        self.element_id = element_id
        self.iterator = iterator


@make_iterator.register(GroupByWindow)
class GroupByWindowIterator(ElementIterator):
    """Collects elements by key, and yields the elements of a dataset for each full window."""

    def __init__(self, node: GroupByWindow, context: Context) -> None:
        self._node = node
        self._context = context
        self._step = step_name(node)
        exits = context.contain_exits
        self._key_of = UserFunction(node.key_func, self._step, exits)
        self._reduce = UserFunction(node.reduce_func, self._step, exits)
        input_ = make_iterator(node.input, context.with_element_numbers(True))
        self._collector = WindowCollector(
            input_, self._step, self._key_of, self._key, self._size, node.window_size or 1
        )
        self._open: _OpenWindow | None = None

    @property
    def can_read_ahead(self) -> bool:
        return False

    @property
    def preferred_limit(self) -> int:
        return _MAX_ELEMENTS_AT_ONCE if self._can_read_ahead() else 1

    def _can_read_ahead(self) -> bool:
        return self._open is not None and self._open.iterator.can_read_ahead

    # --- windows --------------------------------------------------------------------------------

    def _key(self, row: Element) -> int:
        return _check_int("key_func", self._key_of(row))

    def _size(self, key: int) -> int:
        size_func = self._node.window_size_func
        if size_func is None:
            assert self._node.window_size is not None
            return self._node.window_size
        size = _check_int("window_size_func", size_func(np.int64(key)))
        if size < 1:
            raise InvalidElementError(
                f"`window_size_func` must return at least 1, but returned {size} for key {key}"
            )
        return size

    def _open_window(
        self, key: int, rows: list[Element], ordinals: list[int], element_id: Any
    ) -> _OpenWindow:
        """Open the dataset that the function returns for a window."""
        window = self._node.make_dataset(FromSource(source=ElementListSource(rows)))
        try:
            dataset = self._reduce.fn(np.int64(key), window)
        except BaseException as error:
            raise self._reduce.wrap_error(error, ordinals[0]) from error
        plan = getattr(dataset, "plan", None)
        if not isinstance(plan, Node):
            raise UserFunctionError(
                f"`reduce_func` of {self._step} must return a Dataset, but returned "
                f"{type(dataset).__name__} for key {key}",
                position=ordinals[0],
                original_type="TypeError",
            )
        nested = self._context.nested(self._node.number or 0, int(element_id[0]))
        return _OpenWindow(key, ordinals, element_id, self._context.build(plan, nested))

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        was_free = self._can_read_ahead()
        while True:
            if self._open is None:
                window = self._collector.next_window()
                if window is None:
                    return None
                self._open = self._open_window(window.key, window.rows, window.ordinals, window.ids)
                if was_free and not self._can_read_ahead():
                    limit = 1  # the request assumed free reading, but an element now costs calls
            chunk = self._open.iterator.next_chunk(limit)
            if chunk is not None:
                return self._finish_chunk(chunk, self._open)
            self._close_window()

    def _finish_chunk(self, chunk: Chunk, opened: _OpenWindow) -> Chunk:
        if chunk.metadata is not None and opened.element_id is not None:
            chunk = chunk.with_metadata(nest_ids(opened.element_id, chunk.metadata))
        return chunk.with_states(self._states(opened, chunk.states))

    def _states(self, opened: _OpenWindow, dataset_states: States) -> States:
        collector_state, key = self._collector.make_state(opened.ordinals), opened.key
        return lambda index: {**collector_state(), "key": key, "dataset": dataset_states(index)}

    def _close_window(self) -> None:
        if self._open is not None:
            self._open.iterator.close()
        self._open = None

    # --- state ----------------------------------------------------------------------------------

    def get_state(self) -> State:
        if self._open is None:
            return self._collector.make_state()()
        dataset_state = self._open.iterator.get_state()
        return self._states(self._open, lambda index: dataset_state)(0)

    def set_state(self, state: State) -> None:
        self._close_window()
        rows, ordinals, element_id = self._collector.restore(state)
        if ordinals:
            self._open = self._open_window(state["key"], rows, ordinals, element_id)
            self._open.iterator.set_state(state["dataset"])

    def close(self) -> None:
        self._close_window()
        self._collector.close()


@make_iterator.register(BucketBySequenceLength)
class BucketIterator(ElementIterator):
    """Collects elements of similar length, and yields a batch of each full bucket."""

    def __init__(self, node: BucketBySequenceLength, context: Context) -> None:
        self._node = node
        self._step = step_name(node)
        self._length_of = UserFunction(node.element_length_func, self._step, context.contain_exits)
        self._spec = element_spec(node.input)
        self._paddings: dict[int, Padding] = {}  # by bucket
        self._collector = WindowCollector(
            make_iterator(node.input, context),
            self._step,
            self._length_of,
            self._bucket,
            node.bucket_batch_sizes.__getitem__,
            min(node.bucket_batch_sizes),
        )

    @property
    def can_read_ahead(self) -> bool:
        return False

    def _bucket(self, row: Element) -> int:
        """Return the bucket of an element: the number of boundaries that its length reaches."""
        if self._node.element_length_func is len and type(row) is dict:
            raise InvalidElementError(
                "`element_length_func` is len, but the length of a dict is its number of "
                f"components; use lambda x: len(x[{next(iter(row), '...')!r}])"
            )
        length = _check_int("element_length_func", self._length_of(row))
        boundaries = self._node.bucket_boundaries
        bucket = bisect_right(boundaries, length)
        if self._node.pad_to_bucket_boundary and bucket == len(boundaries):
            raise InvalidElementError(
                f"the element has length {length}, but `pad_to_bucket_boundary=True` requires "
                f"lengths below the last of `bucket_boundaries`, {boundaries[-1:]}; filter out "
                "longer elements, truncate them, or add a boundary"
            )
        return bucket

    def next_chunk(self, limit: int) -> Chunk | None:
        before = self._collector.make_state()
        while True:
            window = self._collector.next_window()
            if window is None:
                return None
            is_full = len(window.rows) == self._node.bucket_batch_sizes[window.key]
            if is_full or not self._node.drop_remainder:
                break
        batch = self._batch(window)
        after = self._collector.make_state()
        return Chunk.of_rows([batch], lambda index: after() if index else before(), window.ids)

    def _batch(self, window: KeyedWindow) -> StackedElement:
        try:
            if self._node.no_padding:
                return stack(window.rows)
            return self._padding(window).stack(window.rows)
        except InvalidElementError as error:
            verb = "stack" if self._node.no_padding else "pad"
            raise InvalidElementError(f"{self._step} cannot {verb}: {error}") from error

    def _padding(self, window: KeyedWindow) -> Padding:
        padding = self._paddings.get(window.key)
        if padding is None:
            node = self._node
            shapes = node.padded_shapes
            if node.pad_to_bucket_boundary:
                longest = node.bucket_boundaries[window.key] - 1
                spec = spec_of(window.rows[0]) if self._spec is None else self._spec
                shapes = fill_unknown_lengths(
                    shapes, spec, longest, is_proven=self._spec is not None
                )
            padding = self._paddings[window.key] = Padding(shapes, node.padding_values)
        return padding

    def get_state(self) -> State:
        return self._collector.make_state()()

    def set_state(self, state: State) -> None:
        self._collector.restore(state)

    def close(self) -> None:
        self._collector.close()


def _check_int(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidElementError(
            f"`{name}` must return an integer, but returned {type(value).__name__}"
        ) from None
