"""Base class of the iterators that pack sequences into rows.

The sequences of open rows are held in memory and are not saved (`held_input`). Tokens are only
copied, as slices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element.chunk import Chunk
from headrace.element.metadata import concatenate_metadata
from headrace.element.structure import Element
from headrace.errors import InvalidElementError
from headrace.execution.context import Context
from headrace.execution.element_numbers import IdColumn
from headrace.execution.held_input import HeldInput
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.packing import (
    PACKED_KINDS,
    ConcatThenSplit,
    PackSequences,
    component_lengths,
    packed_names,
)
from headrace.plan.user_function import step_name

__all__ = [
    "MakeState",
    "PackedRow",
    "PackingIterator",
    "Sequences",
    "check_layout",
    "check_sequences",
]

Sequences: TypeAlias = dict[str, NDArray[Any]]
"""One array per component."""
MakeState: TypeAlias = Callable[[], State]

_MAX_ROWS_AT_ONCE = 64


class PackedRow:
    """The contents of a finished row."""

    __slots__ = ("metadata", "parts", "state_after")

    def __init__(
        self, parts: list[Sequences], metadata: IdColumn | None, state_after: MakeState
    ) -> None:
        #: The sequences, in order.
        self.parts: list[Sequences] = parts
        self.metadata: IdColumn | None = metadata
        #: Makes the state after the row.
        self.state_after: MakeState = state_after


class PackingIterator(ElementIterator):
    """Reads sequences and yields rows; subclasses decide which sequences share a row."""

    def __init__(self, node: PackSequences | ConcatThenSplit, context: Context) -> None:
        self._length = node.length
        self._step = step_name(node)
        self._lengths: dict[tuple[str, ...], list[int]] = {}  # of rows, by names of components
        self._input = HeldInput(
            make_iterator(node.input, context), context, self._step, self._held_ordinals
        )

    @property
    def can_read_ahead(self) -> bool:
        return self._input.input.can_read_ahead

    @abstractmethod
    def _held_ordinals(self) -> Iterable[int]:
        """Return the ordinals of all held elements."""

    @abstractmethod
    def _add(self, sequences: Sequences) -> PackedRow | None:
        """Take the next element; return a row if one is finished.

        If the element needs a bin that a finished row frees, it is taken by the next call.

        Raises:
            InvalidElementError: If the element cannot be packed. It was not taken.
        """

    @abstractmethod
    def _finish_row(self) -> PackedRow | None:
        """Return a row that is ready without another element, or None."""

    @abstractmethod
    def _finish_remaining(self) -> PackedRow | None:
        """Return the next of the incomplete rows at the end of the input, or None."""

    @abstractmethod
    def _make_state(self) -> MakeState:
        """Return a function that makes the state of the current contents, now or later."""

    def next_chunk(self, limit: int) -> Chunk | None:
        before = self._make_state()
        rows: list[PackedRow] = []
        limit = min(limit, _MAX_ROWS_AT_ONCE)
        while len(rows) < limit:
            row = self._finish_row()
            if row is None:
                if rows and not self._input.is_buffered:
                    break
                if self._input.read():
                    try:
                        row = self._add_next()
                    except InvalidElementError as error:
                        if rows:
                            break  # raised by the next call
                        raise self._drop_failed(error) from error
                    if row is None:
                        continue
                else:
                    row = self._finish_remaining()
                    if row is None:
                        break
            rows.append(row)
        if not rows:
            return None
        after = [row.state_after for row in rows]
        columns = [row.metadata for row in rows if row.metadata is not None]
        chunk = self._build_chunk(rows)
        if columns:
            chunk = chunk.with_metadata(concatenate_metadata(columns))
        return chunk.with_states(lambda index: after[index - 1]() if index else before())

    def _add_next(self) -> PackedRow | None:
        sequences = check_sequences(self._input.row)
        if any(map(len, sequences.values())):
            return self._add(sequences)
        self._input.drop()
        return None

    def _drop_failed(self, error: InvalidElementError) -> InvalidElementError:
        """Drop the next element; return its error."""
        position = self._input.error_position
        self._input.drop()
        return InvalidElementError(f"element {position} of {self._step}: {error}")

    def _lengths_of(self, names: tuple[str, ...]) -> list[int]:
        """Return the length of a row for each component."""
        lengths = self._lengths.get(names)
        if lengths is None:
            self._lengths[names] = lengths = component_lengths(names, self._length)
        return lengths

    def _build_chunk(self, rows: Sequence[PackedRow]) -> Chunk:
        layout = _layout(rows[0].parts[0])
        if len(rows) > 1 and all(_layout(row.parts[0]) == layout for row in rows):
            return Chunk.of_columns(self._build_columns([row.parts for row in rows]), len(rows))
        elements = [self._build_columns([row.parts]) for row in rows]
        return Chunk.of_rows([{n: v[0] for n, v in element.items()} for element in elements])

    def _build_columns(self, rows: Sequence[list[Sequences]]) -> Sequences:
        """Return stacked rows, each made of sequences."""
        columns: Sequences = {}
        first = rows[0][0]
        for (name, array), length in zip(
            first.items(), self._lengths_of(tuple(first)), strict=True
        ):
            shape = (len(rows), length)
            values = np.zeros(shape, array.dtype)
            segment_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
            counting = np.arange(length + 1, dtype=np.int32)
            for index, parts in enumerate(rows):
                arrays = [part[name] for part in parts]
                sizes = list(map(len, arrays))
                used = sum(sizes)
                np.concatenate(arrays, out=values[index, :used])
                # There may be more sequences than tokens, as one component of some may be empty.
                numbers = np.arange(1, len(sizes) + 1, dtype=np.int32)
                segment_ids[index, :used] = np.repeat(numbers, sizes)
                np.concatenate([counting[:size] for size in sizes], out=positions[index, :used])
            columns.update(zip(packed_names(name), (values, segment_ids, positions), strict=True))
        return columns

    def get_state(self) -> State:
        return self._make_state()()

    def close(self) -> None:
        self._input.close()


def check_sequences(row: Element) -> Sequences:
    """Return the components of an element.

    Raises:
        InvalidElementError: If a component is not a one-dimensional array of numbers.
    """
    is_dict = type(row) is dict
    if not is_dict:
        row = {"tokens": row}
    for name, array in row.items():
        if (
            type(array) is not np.ndarray
            or array.ndim != 1
            or array.dtype.kind not in PACKED_KINDS
            or type(name) is not str
        ):
            found = (
                f"an array of shape {array.shape} and dtype {array.dtype}"
                if isinstance(array, np.ndarray)
                else f"of type {type(array).__name__}"
            )
            raise InvalidElementError(
                f"packing takes one-dimensional arrays of numbers, but component [{name!r}] is "
                f"{found}; drop or convert it in map()"
                if is_dict
                else "packing takes one-dimensional arrays of numbers, or dicts of them, but the "
                f"element is {found}; convert it in map()"
            )
    return row  # type: ignore[no-any-return]


def _layout(sequences: Sequences) -> list[tuple[str, np.dtype[Any]]]:
    return [(name, array.dtype) for name, array in sequences.items()]


def check_layout(sequences: Sequences, held: Sequences) -> None:
    """Check a sequence against one that is held; the order of components may differ.

    Raises:
        InvalidElementError: If components or dtypes differ.
    """
    if sequences.keys() != held.keys() or any(
        array.dtype != held[name].dtype for name, array in sequences.items()
    ):
        raise InvalidElementError(
            f"the element has {_describe(sequences)}, but an element before it has "
            f"{_describe(held)}; convert all elements to the same components and dtypes with map()"
        )


def _describe(sequences: Sequences) -> str:
    return ", ".join(f"{name}: {array.dtype}" for name, array in sequences.items())
