"""An input read element by element, by a step that holds some of the elements.

The step keeps the ordinal of each element that it holds. A state has these ordinals, not the
elements: a restore reads the elements again (`replayable_input`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.metadata import concatenate_metadata, group_metadata
from headrace.element.structure import Element
from headrace.execution.context import Context
from headrace.execution.element_numbers import IdColumn
from headrace.execution.input_buffer import LazyRowStream
from headrace.execution.iterator import ElementIterator, State, element_position
from headrace.execution.replayable_input import (
    MARK_INTERVAL,
    ReplayableInput,
    ReplayMark,
    rows_to_hold,
)

__all__ = ["HeldElement", "HeldInput", "InputPosition", "join_metadata"]


class HeldElement:
    """An element that a step holds."""

    __slots__ = ("metadata", "ordinal", "value")

    def __init__(self, value: Any, ordinal: int, metadata: IdColumn | None) -> None:
        #: The element, or what the step has made from it.
        self.value: Any = value
        self.ordinal: int = ordinal
        self.metadata: IdColumn | None = metadata


class InputPosition:
    """Position of an input, for states: which elements were taken before it."""

    __slots__ = ("_mark", "_num_failed", "num_taken")

    def __init__(self, mark: ReplayMark, num_taken: int, num_failed: int) -> None:
        self._mark = mark
        self._num_failed = num_failed
        self.num_taken: int = num_taken

    @property
    def first(self) -> int:
        """Ordinal of the first element that a restore may read again."""
        return self._mark.ordinal

    def to_json(self) -> dict[str, Any]:
        """Return the entries of a state for `HeldInput.restore`."""
        return self._mark.to_json(self.num_taken, self._num_failed)


class HeldInput:
    """Reads an input; `row` is the next element until `take` or `drop`.

    Args:
        input_: The input, made with `context`.
        context: The context of the step.
        step: Name of the step, for errors.
        held_ordinals: Returns the ordinals of the elements that the step holds.
    """

    def __init__(
        self,
        input_: ElementIterator,
        context: Context,
        step: str,
        held_ordinals: Callable[[], Iterable[int]],
    ) -> None:
        self._input = ReplayableInput(input_, step, MARK_INTERVAL)
        self._held_ordinals = held_ordinals
        #: Whether elements have no metadata, which lazy rows lack.
        self._allows_lazy_rows = not (
            context.wants_element_numbers
            or context.tracks_splits
            or context.split_provider is not None
            or context.split_source is not None
        )
        self._reset(0)

    def _reset(self, num_taken: int) -> None:
        self._chunk: Chunk | None = None
        self._lazy_rows: LazyRowStream | None = None
        self._num_lazy_rows = 0  # rows read from the stream since the last mark
        self._rows: list[Element] = []  # of the chunk, or a lazy row
        self._offset = 0
        self._limit = 1
        self._num_taken = num_taken  # including dropped elements

    @property
    def input(self) -> ElementIterator:
        """The input iterator."""
        return self._input.input

    @property
    def is_buffered(self) -> bool:
        """Whether the next element was read."""
        return self._offset < len(self._rows)

    def read(self) -> bool:
        """Read at least the next element, unless it was; return False at the end."""
        if self._offset < len(self._rows):
            return True
        if self._lazy_rows is not None and self._num_lazy_rows < MARK_INTERVAL:
            return self._read_lazy_row(self._lazy_rows) or self.read()
        self._input.prune(self._held_ordinals)
        input_ = self._input.input
        if self._lazy_rows is not None or (
            self._allows_lazy_rows and input_.has_lazy_rows and not input_.can_read_ahead
        ):
            self._lazy_rows, self._num_lazy_rows = self._input.lazy_rows(), 0
            return self._lazy_rows is not None and self.read()
        if input_.can_read_ahead:
            limit = self._limit
            self._limit = min(2 * limit, MARK_INTERVAL)
        else:
            limit = input_.preferred_limit
        chunk = self._input.read_chunk(limit)
        if chunk is None:
            return False
        self._chunk, self._offset = chunk, 0
        self._rows = rows_to_hold(chunk)
        return True

    def _read_lazy_row(self, lazy_rows: LazyRowStream) -> bool:
        """Read the next lazy row; return False after the last."""
        try:
            for row in lazy_rows.rows:
                self._input.record_taken(lazy_rows, 1)
                self._num_lazy_rows += 1
                self._chunk, self._rows, self._offset = None, [row], 0
                return True
        except Exception:
            self._lazy_rows = None
            self._input.end_lazy_rows(failed=True)
            raise
        self._lazy_rows = None
        self._input.end_lazy_rows(failed=False)
        return False

    @property
    def row(self) -> Element:
        """The next element."""
        return self._rows[self._offset]

    @property
    def error_position(self) -> int:
        """Position of the next element, for its error."""
        if self._chunk is not None:
            return element_position(self._chunk.state_at(self._offset), self._num_taken)
        assert self._lazy_rows is not None
        return element_position(self._lazy_rows.states(-1), self._num_taken)

    def take(self, value: Any) -> HeldElement:
        """Take the next element; the step holds `value` for it."""
        metadata = None if self._chunk is None else self._chunk.metadata
        if metadata is not None:
            metadata = metadata[self._offset : self._offset + 1]
        element = HeldElement(value, self._num_taken, metadata)
        self._num_taken += 1
        self._offset += 1
        return element

    def drop(self) -> None:
        """Drop the next element, which failed or is empty."""
        self._num_taken += 1
        self._offset += 1

    def position(self) -> InputPosition:
        """Return the position before the next element."""
        return InputPosition(self._input.oldest_mark, self._num_taken, self._input.num_failed)

    def restore(self, state: State, ordinals: Iterable[int]) -> dict[int, HeldElement]:
        """Restore a state; return the elements with these ordinals, read again.

        Args:
            state: A state that includes the result of `InputPosition.to_json`.
            ordinals: Ordinals of the elements held then.
        """
        needed = sorted(ordinals)
        self._reset(state["first_ordinal"] + state["num_read"])
        found: dict[int, HeldElement] = {}
        remaining = iter(needed)
        for chunk in self._input.restore(state, np.array(needed, np.int64)):
            for index, row in enumerate(rows_to_hold(chunk)):
                ordinal = next(remaining)
                metadata = chunk.take_metadata(slice(index, index + 1))
                found[ordinal] = HeldElement(row, ordinal, metadata)
        return found

    def close(self) -> None:
        """Close the input."""
        self._reset(self._num_taken)
        self._input.close()


def join_metadata(elements: Sequence[HeldElement]) -> IdColumn | None:
    """Return the metadata of an element made from all of these."""
    columns = [element.metadata for element in elements if element.metadata is not None]
    if not columns:
        return None
    return group_metadata(concatenate_metadata(columns), len(columns))
