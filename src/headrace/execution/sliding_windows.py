"""Iterators over sliding windows: as datasets, or as batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headrace.element.chunk import Chunk, States
from headrace.element.memory import copy_array
from headrace.element.spec import ArraySpec
from headrace.element.stack import stack_column
from headrace.element.structure import unflatten
from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.element_numbers import nest_ids, number_positions
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.execution.sliding_buffer import SlidingBuffer, WindowRun
from headrace.plan.elements import FromSource
from headrace.plan.sliding_windows import BatchedWindows, Window
from headrace.sources.window import WindowSource

__all__ = ["BatchedWindowsIterator", "WindowIterator"]

_MAX_BATCH_BYTES = 1 << 20
"""Approximate bytes of batches to copy at once."""


@make_iterator.register(Window)
class WindowIterator(ElementIterator):
    """Yields windows as datasets."""

    def __init__(self, node: Window, context: Context) -> None:
        self._node = node
        self._buffer = SlidingBuffer(make_iterator(node.input, context), node)

    @property
    def can_read_ahead(self) -> bool:
        return self._buffer.input.can_read_ahead

    def next_chunk(self, limit: int) -> Chunk | None:
        run = self._buffer.next_run(limit)
        if run is None:
            return None
        make, stride = self._node.make_dataset, self._node.stride
        parts = [(leaf, _element_spec(leaf)) for leaf in run.leaves]
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


def _element_spec(buffer: Any) -> ArraySpec | None:
    """Return the spec of the elements of a buffer, if it is an array that shows it."""
    if not isinstance(buffer, np.ndarray) or buffer.dtype.hasobject:
        return None
    return ArraySpec(buffer.shape[1:], buffer.dtype)
