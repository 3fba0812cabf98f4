"""What travels with elements: the number of a place, and where it is asked for, an origin.

A column of a chunk (`Chunk.places`) has one entry an element: a number (`execution.places`), or a
record of a number and an origin. An origin names an element for whoever deals out a plan: the unit
that it is of, and which element of that unit it is, counted at the root (`rewrites.roots`). Below
the root only the unit is known. An element that is made from several, a batch, has the origins of
all of them.

All of these are arrays, so whoever chooses, holds or reorders elements does the same to the column,
and knows nothing of what is in it. Where elements are of units in a row, one of each, three numbers
say so (`InRow`) until somebody does that: where chunks are small, to make and join their arrays
costs more than to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Column",
    "InRow",
    "grouped",
    "has_origins",
    "joined",
    "joined_columns",
    "named",
    "numbers_in",
    "of_units",
    "row_counts",
    "rows_of",
]

_PLACE: list[tuple[str, Any]] = [("place", np.uint64)]
_UNIT: list[tuple[str, Any]] = [("unit", np.int64)]
_ORIGIN: list[tuple[str, Any]] = [*_UNIT, ("ordinal", np.int64)]
#: Whether there are places -> below the root, from the root on, and of what is made from several
#: elements: an array (n, 2) of units and ordinals.
_BELOW = {False: np.dtype(_UNIT), True: np.dtype(_PLACE + _UNIT)}
_AT_ROOT = {False: np.dtype(_ORIGIN), True: np.dtype(_PLACE + _ORIGIN)}
_OF_ROWS = {False: np.dtype([("rows", object)]), True: np.dtype([*_PLACE, ("rows", object)])}


class InRow:
    """A column without places: of units in a row, one element of each.

    Attributes:
        unit: The first.
        size: How many.
        ordinal: Which element of each; None: below the root.
    """

    __slots__ = ("ordinal", "size", "unit")

    def __init__(self, unit: int, size: int, ordinal: int | None = None) -> None:
        self.unit = unit
        self.size = size
        self.ordinal = ordinal

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> InRow:
        start, stop, _ = part.indices(self.size)
        return InRow(self.unit + start, max(0, stop - start), self.ordinal)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the array."""
        return (_BELOW if self.ordinal is None else _AT_ROOT)[False]

    def made(self) -> NDArray[Any]:
        """Return the array."""
        units = np.arange(self.unit, self.unit + self.size)
        if self.ordinal is None:
            return of_units(units, None)
        return named(units, np.full(self.size, self.ordinal))


Column: TypeAlias = NDArray[Any] | InRow


def numbers_in(column: NDArray[Any]) -> NDArray[np.uint64] | None:
    """Return the numbers of places that a column has, if it has some."""
    names = column.dtype.names
    if names is None:
        return column
    return column["place"] if "place" in names else None


def of_units(units: NDArray[np.int64], places: NDArray[np.uint64] | None) -> NDArray[Any]:
    """Return a column below the root: units as they were dealt, and places if there are some."""
    column = np.empty(len(units), _BELOW[places is not None])
    column["unit"] = units
    if places is not None:
        column["place"] = places
    return column


def named(
    units: NDArray[np.int64] | int,
    ordinals: NDArray[np.int64],
    places: NDArray[np.uint64] | None = None,
) -> NDArray[Any]:
    """Return a column of elements with these origins, and places if there are some."""
    column = np.empty(len(ordinals), _AT_ROOT[places is not None])
    column["unit"], column["ordinal"] = units, ordinals
    if places is not None:
        column["place"] = places
    return column


def has_origins(column: NDArray[Any] | None) -> bool:
    """Say whether a column has origins: it is one from the root on."""
    names = None if column is None else column.dtype.names
    return names is not None and names[-1] != "unit"


def rows_of(column: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the units and the ordinals of all elements, or of all that they were made from."""
    if "rows" not in (column.dtype.names or ()):
        return column["unit"], column["ordinal"]
    parts = list(column["rows"])
    rows = np.concatenate(parts) if parts else np.empty((0, 2), np.int64)
    return rows[:, 0], rows[:, 1]


def row_counts(column: NDArray[Any]) -> tuple[int, ...]:
    """Return from how many each element was made; (): each from as many."""
    if "rows" not in (column.dtype.names or ()):
        return ()
    sizes = tuple(len(rows) for rows in column["rows"])
    return () if len(set(sizes)) < 2 else sizes


def joined(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return columns one after the other. Where some have origins of several, all have."""
    if len(columns) == 1:
        return columns[0]
    dtype = columns[0].dtype
    for column in columns:
        if column.dtype is not dtype and column.dtype != dtype:
            columns = [grouped(column, 1) for column in columns]
            dtype = columns[0].dtype
            break
    if dtype.hasobject or dtype.names is None:
        # Said, for to find a dtype for records takes three times as long as to copy them.
        return np.concatenate(columns, dtype=dtype, casting="no")
    # Whole records are copied faster than field by field.
    as_bytes = np.dtype((np.void, dtype.itemsize))
    return np.concatenate([column.view(as_bytes) for column in columns]).view(dtype)


def joined_columns(columns: Sequence[Column]) -> Column:
    """Return columns one after the other, as `joined`; in a row, if they are."""
    first = columns[0]
    if len(columns) == 1:
        return first
    if isinstance(first, InRow):
        following = first.unit
        for each in columns:
            if not isinstance(each, InRow) or each.unit != following:
                break
            if each.ordinal != first.ordinal:
                break
            following += each.size
        else:
            return InRow(first.unit, following - first.unit, first.ordinal)
    return joined([each.made() if isinstance(each, InRow) else each for each in columns])


def grouped(column: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the column of what is made from `size` elements each; the last may have fewer.

    A place is that of the first of them.
    """
    if not has_origins(column) or (size == 1 and "rows" in (column.dtype.names or ())):
        return column[::size]
    places = numbers_in(column)
    made = np.empty(-(-len(column) // size), _OF_ROWS[places is not None])
    if places is not None:
        made["place"] = places[::size]
    if "rows" in (column.dtype.names or ()):
        rows = column["rows"]
        for number in range(len(made)):
            made["rows"][number] = np.concatenate(rows[number * size : (number + 1) * size])
        return made
    both = np.empty((len(column), 2), np.int64)
    both[:, 0], both[:, 1] = column["unit"], column["ordinal"]
    for number in range(len(made)):
        made["rows"][number] = both[number * size : (number + 1) * size]
    return made
