"""Iterators over sliding windows: as datasets, or as batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headrace.element.chunk import Chunk, States
from headrace.element.memory import copy_array
from headrace.element.spec import ArraySpec, Spec
from headrace.element.stack import stack_column
from headrace.element.structure import flatten, unflatten
from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.sliding_buffer import SlidingBuffer, WindowRun
from headrace.plan.batching import Batch
from headrace.plan.elements import FromSource
from headrace.plan.sliding_windows import BatchedWindows, Window
from headrace.plan.traverse import element_spec
from headrace.plan.user_function import step_name
from headrace.sources.window import WindowSource

__all__ = ["BatchedWindowsIterator", "WindowIterator"]

_MAX_BATCH_BYTES = 1 << 16
"""Approximate bytes of batches to copy at once."""


@make_iterator.register(Window)
class WindowIterator(ElementIterator):
    """Yields windows as datasets."""

    def __init__(self, node: Window, context: Context) -> None:
        self._node = node
        self._buffer = SlidingBuffer(make_iterator(node.input, context), node)
        self._specs = flatten(element_spec(node.input))[0]  # none if the plan does not tell

    @property
    def can_read_ahead(self) -> bool:
        return self._buffer.input.can_read_ahead

    def next_chunk(self, limit: int) -> Chunk | None:
        run = self._buffer.next_run(limit)
        if run is None:
            return None
        make, stride = self._node.make_dataset, self._node.stride
        specs = self._specs or [None] * len(run.leaves)
        parts = list(zip(run.leaves, map(_element_spec, run.leaves, specs), strict=True))
        rows = [
            unflatten(
                run.structure,
                [
                    make(FromSource(source=WindowSource(leaf, start, stop, stride, spec)))
                    for leaf, spec in parts
                ],
            )
            for start, stop in run.bounds
        ]
        return Chunk.of_rows(rows, run.states, run.ids)

    def get_state(self) -> State:
        return self._buffer.get_state()

    def set_state(self, state: State) -> None:
        self._buffer.set_state(state)

    def close(self) -> None:
        self._buffer.close()


def _element_spec(buffer: Any, declared: Spec | None) -> Spec | None:
    """Return the spec of the elements of a buffer: that of the plan, else what an array shows.

    An array does not show lengths, which may differ in other windows.
    """
    if isinstance(declared, ArraySpec):
        return declared
    if not isinstance(buffer, np.ndarray) or buffer.dtype.hasobject:
        return None
    return ArraySpec((None,) * (buffer.ndim - 1), buffer.dtype)


@make_iterator.register(BatchedWindows)
def _make_batched(node: BatchedWindows, context: Context) -> ElementIterator:
    if context.wants_element_numbers:
        return make_iterator(node.general_plan, context)
    return BatchedWindowsIterator(node, context)


class BatchedWindowsIterator(ElementIterator):
    """Yields a batch of each window, with the elements, errors and states of the `flat_map`.

    A state is that of the flat_map before it opens the next window.
    """

    def __init__(self, node: BatchedWindows, context: Context) -> None:
        self._node = node
        self._context = context
        self._buffer = SlidingBuffer(make_iterator(node.input, context), node.window)
        self._num_windows = 0
        self._has_ended = False
        #: The iterator of the replaced steps, from where the proof did not hold.
        self._general: ElementIterator | None = None

    @property
    def can_read_ahead(self) -> bool:
        return (self._general or self._buffer.input).can_read_ahead

    @property
    def preferred_limit(self) -> int:
        return 1 if self._general is None else self._general.preferred_limit

    def next_chunk(self, limit: int) -> Chunk | None:
        while self._general is None and not self._has_ended:
            if not self._node.proof.holds:
                self._switch(self.get_state())
                break
            before = self._num_windows
            run = self._buffer.next_run(self._limit(limit))
            if run is None:
                return None
            if not self._is_expected(run):
                self._switch(_state(run.states, before)(0))
                break
            self._num_windows += len(run.bounds)
            chunk = self._batch(run)
            if chunk is not None:
                return chunk.with_states(_state(run.states, before))
        return None if self._general is None else self._general.next_chunk(limit)

    def _limit(self, limit: int) -> int:
        row_bytes = self._buffer.row_bytes
        return max(1, min(limit, _MAX_BATCH_BYTES // max(1, row_bytes * self._node.window.size)))

    def _is_expected(self, run: WindowRun) -> bool:
        """Return whether the function can be called with the components of these windows."""
        count = len(self._node.proof.batches)
        return run.structure == flatten(0 if count == 1 else (0,) * count)[1]

    def _batch(self, run: WindowRun) -> Chunk | None:
        """Return the batches of windows, or None if there are none."""
        window, bounds = self._node.window, run.bounds
        first, last = bounds[0], bounds[-1]
        is_full = last[1] - last[0] == window.span
        if not is_full and self._node.proof.drops_remainder:
            return None
        if is_full and all(isinstance(leaf, np.ndarray) for leaf in run.leaves):
            columns = [
                copy_array(_as_windows(leaf, first[0], len(bounds), window)) for leaf in run.leaves
            ]
            return Chunk.of_columns(unflatten(run.structure, columns), len(bounds))
        rows = []
        for start, stop in bounds:
            parts = [leaf[start : stop : window.stride] for leaf in run.leaves]
            columns = list(map(_stack, parts, self._node.proof.batches))
            rows.append(unflatten(run.structure, columns))
        return Chunk.of_rows(rows)

    # --- state ----------------------------------------------------------------------------------

    def _switch(self, state: State) -> None:
        """Continue with the replaced steps."""
        self._buffer.close()
        self._general = make_iterator(self._node.general_plan, self._context)
        self._general.set_state(state)

    def get_state(self) -> State:
        if self._general is not None:
            return self._general.get_state()
        buffer_state = self._buffer.get_state()
        return _state(lambda index: buffer_state, self._num_windows)(0)

    def set_state(self, state: State) -> None:
        if self._general is not None:
            self._general.set_state(state)
            return
        (slot,) = state["slots"]
        if slot is None or _was_read(slot["dataset"]):
            outer, number = state["input"], state["next_number"]
        else:  # opened, but not read
            outer, number = slot["outer"], slot["number"]
        self._buffer.set_state(outer)
        self._num_windows = number
        self._has_ended = state["ended"]

    def close(self) -> None:
        self._has_ended = True
        self._buffer.close()
        if self._general is not None:
            self._general.close()


def _as_windows(buffer: NDArray[Any], first: int, count: int, window: Window) -> NDArray[Any]:
    """Return a view of `count` windows, stacked."""
    row, *inner = buffer.strides
    return as_strided(
        buffer[first:],
        (count, window.size, *buffer.shape[1:]),
        (row * window.step, row * window.stride, *inner),
        writeable=False,
    )


def _stack(rows: NDArray[Any] | list[Any], batch: Batch) -> NDArray[Any]:
    """Return the batch of a component's elements, as `BatchIterator` does."""
    if isinstance(rows, np.ndarray):
        return copy_array(rows)
    try:
        return stack_column(rows)
    except InvalidElementError as error:
        raise InvalidElementError(f"{step_name(batch)} cannot stack: {error}") from error


def _state(window_states: States, number: int) -> States:
    """Return the states of a `flat_map` before it opens windows, the first with this number."""
    return lambda index: {
        "input": window_states(index),
        "slots": [None],
        "next_number": number + index,
        "current": 0,
        "taken": 0,
        "ended": False,
    }


def _was_read(state: State) -> bool:
    """Return whether elements of an opened window were read, which are all in one batch."""
    if isinstance(state, list):
        return any(map(_was_read, state))
    if "input" in state:  # of a batch
        return _was_read(state["input"])
    return bool(state["index"] or state["ordinal"])
