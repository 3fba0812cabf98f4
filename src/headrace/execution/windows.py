"""Iterators over windows: the datasets that a function makes of them, or padded batches."""

from __future__ import annotations

import operator
from bisect import bisect_right
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk, States
from headrace.element.pad import Padding, with_lengths
from headrace.element.spec import spec_of
from headrace.element.stack import Stacked, stack
from headrace.element.structure import Element
from headrace.errors import InvalidElementError, UserFunctionError
from headrace.execution.context import Context
from headrace.execution.gathering import Gathering, Window
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.places import Places, within
from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.traverse import element_spec
from headrace.plan.user_function import UserFunction, step_name
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.sources.memory import HeldRowsSource

__all__ = ["BucketIterator", "GroupByWindowIterator"]

_MANY = 1024
"""Elements to ask a dataset for that reads ahead freely."""


class _Open:
    """The dataset that a function returned for a window."""

    def __init__(
        self, key: int, ordinals: list[int], place: Places | None, iterator: ElementIterator
    ) -> None:
        self.key = key
        self.ordinals = ordinals
        self.place = place
        self.iterator = iterator


@make_iterator.register(GroupByWindow)
class GroupByWindowIterator(ElementIterator):
    """Gathers elements by key, and yields the elements of a dataset for each full window."""

    def __init__(self, node: GroupByWindow, context: Context) -> None:
        self._node = node
        self._context = context
        self._step = step_name(node)
        exits = context.contain_exits
        self._key_of = UserFunction(node.key_func, self._step, exits)
        self._reduce = UserFunction(node.reduce_func, self._step, exits)
        input_ = make_iterator(node.input, context.with_places(True))
        self._gathering = Gathering(
            input_, self._step, self._key_of, self._key, self._size, node.window_size or 1
        )
        self._open: _Open | None = None

    @property
    def reads_ahead_freely(self) -> bool:
        return False

    @property
    def at_hand(self) -> int:
        return _MANY if self._is_free() else 1

    def _is_free(self) -> bool:
        return self._open is not None and self._open.iterator.reads_ahead_freely

    # --- windows --------------------------------------------------------------------------------

    def _key(self, row: Element) -> int:
        return _as_int("key_func", self._key_of(row))

    def _size(self, key: int) -> int:
        ask = self._node.window_size_func
        if ask is None:
            assert self._node.window_size is not None
            return self._node.window_size
        size = _as_int("window_size_func", ask(np.int64(key)))
        if size < 1:
            raise InvalidElementError(
                f"`window_size_func` must return at least 1, but returned {size} for the key {key}"
            )
        return size

    def _open_window(self, key: int, rows: list[Element], ordinals: list[int], place: Any) -> _Open:
        """Open the dataset that the function returns for a window."""
        window = self._node.make_dataset(FromSource(source=HeldRowsSource(rows)))
        try:
            dataset = self._reduce.fn(np.int64(key), window)
        except BaseException as error:
            raise self._reduce.blame(error, ordinals[0]) from error
        plan = getattr(dataset, "plan", None)
        if not isinstance(plan, Node):
            raise UserFunctionError(
                f"`reduce_func` of {self._step} must return a Dataset, but returned "
                f"{type(dataset).__name__} for the key {key}",
                position=ordinals[0],
                original_type="TypeError",
            )
        nested = self._context.nested(self._node.number or 0, int(place[0]))
        return _Open(key, ordinals, place, self._context.build(plan, nested))

    # --- reading --------------------------------------------------------------------------------

    def next_chunk(self, limit: int) -> Chunk | None:
        was_free = self._is_free()
        while True:
            if self._open is None:
                window = self._gathering.next_window()
                if window is None:
                    return None
                self._open = self._open_window(
                    window.key, window.rows, window.ordinals, window.place
                )
                if was_free and not self._is_free():
                    limit = 1  # more may not have been meant, now that it costs calls
            chunk = self._open.iterator.next_chunk(limit)
            if chunk is not None:
                return self._as_ours(chunk, self._open)
            self._close_open()

    def _as_ours(self, chunk: Chunk, opened: _Open) -> Chunk:
        if chunk.places is not None and opened.place is not None:
            chunk = chunk.with_places(within(opened.place, chunk.places))
        return chunk.with_states(self._states(opened, chunk.states))

    def _states(self, opened: _Open, inner: States) -> States:
        standing, key = self._gathering.standing(opened.ordinals), opened.key
        return lambda index: {**standing(), "key": key, "inner": inner(index)}

    def _close_open(self) -> None:
        if self._open is not None:
            self._open.iterator.close()
        self._open = None

    # --- state ----------------------------------------------------------------------------------

    def get_state(self) -> State:
        if self._open is None:
            return self._gathering.standing()()
        inner = self._open.iterator.get_state()
        return self._states(self._open, lambda index: inner)(0)

    def set_state(self, state: State) -> None:
        self._close_open()
        rows, ordinals, place = self._gathering.restore(state)
        if ordinals:
            self._open = self._open_window(state["key"], rows, ordinals, place)
            self._open.iterator.set_state(state["inner"])

    def close(self) -> None:
        self._close_open()
        self._gathering.close()


@make_iterator.register(BucketBySequenceLength)
class BucketIterator(ElementIterator):
    """Gathers elements of like length, and yields a batch of each full bucket."""

    def __init__(self, node: BucketBySequenceLength, context: Context) -> None:
        self._node = node
        self._step = step_name(node)
        self._length_of = UserFunction(node.element_length_func, self._step, context.contain_exits)
        self._spec = element_spec(node.input)
        self._paddings: dict[int, Padding] = {}  # by bucket
        self._gathering = Gathering(
            make_iterator(node.input, context),
            self._step,
            self._length_of,
            self._bucket,
            node.bucket_batch_sizes.__getitem__,
            min(node.bucket_batch_sizes),
        )

    @property
    def reads_ahead_freely(self) -> bool:
        return False

    def _bucket(self, row: Element) -> int:
        """Return the number of the bucket of an element: boundaries that it reaches."""
        length = _as_int("element_length_func", self._length_of(row))
        boundaries = self._node.bucket_boundaries
        bucket = bisect_right(boundaries, length)
        if self._node.pad_to_bucket_boundary and bucket == len(boundaries):
            raise InvalidElementError(
                f"the element has length {length}, and the last of `bucket_boundaries` is "
                f"{boundaries[-1:]}: with `pad_to_bucket_boundary` all must be shorter; filter "
                "longer ones out, cut them, or add a boundary"
            )
        return bucket

    def next_chunk(self, limit: int) -> Chunk | None:
        before = self._gathering.standing()
        while True:
            window = self._gathering.next_window()
            if window is None:
                return None
            is_full = len(window.rows) == self._node.bucket_batch_sizes[window.key]
            if is_full or not self._node.drop_remainder:
                break
        batch = self._batch(window)
        after = self._gathering.standing()
        return Chunk.of_rows([batch], lambda index: after() if index else before(), window.place)

    def _batch(self, window: Window) -> Stacked:
        try:
            if self._node.no_padding:
                return stack(window.rows)
            return self._padding(window).stack(window.rows)
        except InvalidElementError as error:
            verb = "stack" if self._node.no_padding else "pad"
            raise InvalidElementError(f"{self._step} cannot {verb}: {error}") from error

    def _padding(self, window: Window) -> Padding:
        padding = self._paddings.get(window.key)
        if padding is None:
            node = self._node
            shapes = node.padded_shapes
            if node.pad_to_bucket_boundary:
                longest = node.bucket_boundaries[window.key] - 1
                spec = spec_of(window.rows[0]) if self._spec is None else self._spec
                shapes = with_lengths(shapes, spec, longest, is_proven=self._spec is not None)
            padding = self._paddings[window.key] = Padding(shapes, node.padding_values)
        return padding

    def get_state(self) -> State:
        return self._gathering.standing()()

    def set_state(self, state: State) -> None:
        self._gathering.restore(state)

    def close(self) -> None:
        self._gathering.close()


def _as_int(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidElementError(
            f"`{name}` must return an integer, but returned {type(value).__name__}"
        ) from None
