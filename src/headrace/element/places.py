"""What travels with elements: the number of a place, and where it is asked for, an origin.

A column of a chunk (`Chunk.places`) has one entry an element: a number (`execution.places`), or a
record of a number and an origin. An origin names an element for whoever deals out a plan: the unit
that it is of, and which element of that unit it is, counted at the root (`rewrites.roots`). Below
the root only the unit is known. An element that is made from several, a batch, has the origins of
all of them.

All of these are arrays, so whoever chooses, holds or reorders elements does the same to the column,
and knows nothing of what is in it. Until somebody does that, a few numbers may say the same
(`element.brief`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AT_ROOT",
    "BELOW",
    "grouped",
    "has_origins",
    "joined",
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
BELOW = {False: np.dtype(_UNIT), True: np.dtype(_PLACE + _UNIT)}
AT_ROOT = {False: np.dtype(_ORIGIN), True: np.dtype(_PLACE + _ORIGIN)}
_OF_ROWS = {False: np.dtype([("rows", object)]), True: np.dtype([*_PLACE, ("rows", object)])}


def numbers_in(column: NDArray[Any]) -> NDArray[np.uint64] | None:
    """Return the numbers of places that a column has, if it has some."""
    names = column.dtype.names
    if names is None:
        return column
    return column["place"] if "place" in names else None


def of_units(units: NDArray[np.int64], places: NDArray[np.uint64] | None) -> NDArray[Any]:
    """Return a column below the root: units as they were dealt, and places if there are some."""
    column = np.empty(len(units), BELOW[places is not None])
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
    column = np.empty(len(ordinals), AT_ROOT[places is not None])
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
