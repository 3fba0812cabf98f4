"""A chunk: n elements that travel together, as rows or as columns, whichever is at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.element import stack as stacking
from headrace.element.brief import Column, joined_columns
from headrace.element.stack import Stacked
from headrace.element.structure import Element
from headrace.errors import InvalidElementError

__all__ = ["Chunk", "PlacesLater", "States", "concatenate"]

States: TypeAlias = Callable[[int], Any]
"""The state of a stream before element i of a chunk of it; i == size: after the last. Called only
when somebody asks, perhaps much later and on another thread, so it holds what it needs and reads
nothing that changes."""
PlacesLater: TypeAlias = Callable[[], Column]
"""Makes the places of a chunk's elements when somebody asks, always the same. It may be called
several times, by other threads too."""


class Chunk:
    """Elements in order. A chunk and what it holds are not to be changed in place.

    Holds rows (a list of elements), columns (one stacked element), or both once one was asked of
    the other. A chunk that an iterator yields also knows the places of its elements (`state_at`).

    >>> chunk = hr.Chunk.of_columns({"x": np.array([1, 2, 3])}, 3)
    >>> chunk.size, chunk.rows()[0]
    (3, {'x': np.int64(1)})
    >>> chunk.slice(1, 3).columns()
    {'x': array([2, 3])}

    Attributes:
        places: The number of each element's place, where somebody asked for them: which element of
            the plan it is. The numbers go wherever the elements go, through steps that hold
            elements too, while `state_at` says where the stream stands. They may have origins
            with them (`element.places`).
    """

    __slots__ = ("_columns", "_places", "_rows", "_states", "size")

    size: int
    """Number of elements."""

    def __init__(
        self,
        rows: list[Element] | None,
        columns: Stacked,
        size: int,
        states: States | None = None,
        places: Column | PlacesLater | None = None,
    ) -> None:
        self._rows = rows
        self._columns = columns
        self._states = states
        self._places = places
        self.size = size

    @classmethod
    def of_rows(
        cls,
        rows: list[Element],
        states: States | None = None,
        places: Column | None = None,
    ) -> Chunk:
        """Return a chunk of these elements; the list now belongs to it."""
        return cls(rows, _UNKNOWN, len(rows), states, places)

    @classmethod
    def of_columns(
        cls,
        columns: Stacked,
        size: int,
        states: States | None = None,
        places: Column | None = None,
    ) -> Chunk:
        """Return a chunk of the `size` rows of a stacked element."""
        return cls(None, columns, size, states, places)

    def with_states(self, states: States) -> Chunk:
        """Return the same elements, in a stream that stands there before each of them."""
        return Chunk(self._rows, self._columns, self.size, states, self._places)

    @property
    def places(self) -> NDArray[Any] | None:
        """The places of the elements, where somebody asked for them."""
        places = self._places
        if callable(places):
            places = self._places = places()
        if not (places is None or isinstance(places, np.ndarray)):
            places = self._places = places.made()
        return places

    @property
    def column(self) -> Column | None:
        """The places, in few numbers if that is how they are at hand: to be passed on."""
        places = self._places
        if callable(places):
            places = self._places = places()
        return places

    @property
    def places_later(self) -> PlacesLater | None:
        """What makes the column, to be kept without the elements."""
        places = self._places
        return places if places is None or callable(places) else lambda: places

    def with_places(self, places: Column | PlacesLater | None) -> Chunk:
        """Return the same elements with these numbers of places, or what makes them."""
        return Chunk(self._rows, self._columns, self.size, self._states, places)

    def state_at(self, index: int) -> Any:
        """Return the state of the stream before element `index`; `size`: after the last."""
        if self._states is None:
            raise ValueError("these elements have no places: the chunk comes from no iterator")
        return self._states(index)

    @property
    def has_states(self) -> bool:
        """Whether it says where the stream stands before each element."""
        return self._states is not None

    @property
    def states(self) -> States:
        """What `state_at` calls, to be kept without the elements."""
        return self.state_at if self._states is None else self._states

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Chunk({self.size} {'columnar' if self.is_columnar else 'rows'})"

    @property
    def is_columnar(self) -> bool:
        """Whether columns are at hand, so that `columns` costs nothing."""
        return self._columns is not _UNKNOWN

    def rows(self) -> list[Element]:
        """Return the elements; arrays are views when they were columns. Remembered."""
        if self._rows is None:
            self._rows = stacking.unstack(self._columns, self.size)
        return self._rows

    def columns(self) -> Stacked:
        """Return the elements as one stacked element. Remembered.

        Raises:
            InvalidElementError: The elements differ in structure, shape or dtype, or there are
                none.
        """
        if self._columns is _UNKNOWN:
            if not self._rows:
                raise InvalidElementError(
                    "a chunk of no rows has no columns; ask for its rows instead"
                )
            self._columns = stacking.stack(self._rows)
        return self._columns

    def slice(self, start: int, stop: int) -> Chunk:
        """Return elements `start` to `stop` - 1, as views; both are clipped to the chunk."""
        start = max(start, 0)
        stop = max(min(stop, self.size), start)
        if start == 0 and stop == self.size:
            return self
        rows = None if self._rows is None else self._rows[start:stop]
        states = self._states
        if states is not None and start:
            whole = states
            states = lambda index: whole(start + index)  # noqa: E731 - a name would cost a line
        places = self._places
        if callable(places):
            later = places
            places = lambda: later()[start:stop]  # noqa: E731
        elif places is not None:
            places = places[start:stop]
        if self._columns is _UNKNOWN:
            return Chunk(rows, _UNKNOWN, stop - start, states, places)
        columns = stacking.slice_rows(self._columns, start, stop)
        return Chunk(rows, columns, stop - start, states, places)

    def take(self, indices: Any) -> Chunk:
        """Return the elements at `indices` (a sequence of int, or an array of one axis).

        They have no states: whoever leaves elements out knows where the others are.
        """
        places = self.places_of(indices)
        if self._columns is not _UNKNOWN:
            columns = stacking.take(self._columns, indices)
            return Chunk(None, columns, len(indices), None, places)
        rows = self.rows()
        chosen = indices.tolist() if isinstance(indices, np.ndarray) else indices
        return Chunk.of_rows([rows[index] for index in chosen], None, places)

    def places_of(self, indices: Any) -> NDArray[Any] | None:
        """Return the places of some elements: those at `indices`, as for `take`, or a slice."""
        return None if self.places is None else self.places[indices]

    def column_of(self, start: int, stop: int) -> Column | None:
        """Return the places of elements `start` to `stop` - 1, in few numbers if they are so."""
        column = self.column
        return None if column is None else column[start:stop]

    def column_at(self, indices: list[int]) -> Column | None:
        """Return the places of the elements at `indices`, some, in ascending order."""
        start, stop = indices[0], indices[-1] + 1
        are_all = stop - start == len(indices)
        return self.column_of(start, stop) if are_all else self.places_of(indices)


def concatenate(chunks: Sequence[Chunk]) -> Chunk:
    """Return the elements of all chunks in order; one chunk comes back as it is.

    Columns stay columns where all chunks have them and their rows are alike.

    Raises:
        ValueError: There are no chunks.
    """
    if not len(chunks):
        raise ValueError("chunks is empty; at least one chunk is needed")
    if len(chunks) == 1:
        return chunks[0]
    places = _joined_places(chunks)
    if all(chunk.is_columnar for chunk in chunks):
        try:
            joined = stacking.concatenate([chunk.columns() for chunk in chunks])
        except InvalidElementError:
            # Chunks may differ in shape, as elements may: that is what rows are for.
            pass
        else:
            return Chunk.of_columns(joined, sum(map(len, chunks)), None, places)
    rows: list[Element] = []
    for chunk in chunks:
        rows.extend(chunk.rows())
    return Chunk.of_rows(rows, None, places)


def _joined_places(chunks: Sequence[Chunk]) -> Column | None:
    places = [column for chunk in chunks if (column := chunk.column) is not None]
    return joined_columns(places) if len(places) == len(chunks) else None


class _Unknown:
    """The columns that were not made yet; None is a possible element."""


_UNKNOWN = _Unknown()
