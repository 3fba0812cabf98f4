"""Metadata of elements: element numbers and, if requested, element ids.

A metadata column of a chunk (`Chunk.metadata`) has one entry per element: an element number
(`execution.element_numbers`), or a record of a number and an element id. An element id is the pair
of the split and the ordinal of the element in it, counted at the partition boundary
(`rewrites.partition_boundaries`). Below the boundary only the split is known. An element made from
several elements, such as a batch, has the ids of all of them, its constituents.

Columns are arrays, so a step that selects, buffers or reorders elements applies the same operation
to the column without knowing its contents. Until then a compact form may replace the array
(`element.compact_columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ID_DTYPES",
    "SPLIT_DTYPES",
    "concatenate_metadata",
    "constituent_counts",
    "constituent_ids",
    "element_numbers",
    "group_metadata",
    "has_element_ids",
    "id_column",
    "split_column",
    "without_element_numbers",
]

_NUMBER_FIELD: list[tuple[str, Any]] = [("number", np.uint64)]
_SPLIT_FIELD: list[tuple[str, Any]] = [("split", np.int64)]
_ID_FIELDS: list[tuple[str, Any]] = [*_SPLIT_FIELD, ("ordinal", np.int64)]
#: Dtypes by whether there are element numbers: below the partition boundary, above it, and for
#: elements made from several, whose constituents are an array (n, 2) of splits and ordinals.
SPLIT_DTYPES = {False: np.dtype(_SPLIT_FIELD), True: np.dtype(_NUMBER_FIELD + _SPLIT_FIELD)}
ID_DTYPES = {False: np.dtype(_ID_FIELDS), True: np.dtype(_NUMBER_FIELD + _ID_FIELDS)}
_CONSTITUENT_DTYPES = {
    False: np.dtype([("constituents", object)]),
    True: np.dtype([*_NUMBER_FIELD, ("constituents", object)]),
}


def element_numbers(column: NDArray[Any]) -> NDArray[np.uint64] | None:
    """Return the element numbers of a column, or None if it has none."""
    names = column.dtype.names
    if names is None:
        return column
    return column["number"] if "number" in names else None


def without_element_numbers(column: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return a column without its element numbers; None if nothing is left."""
    names = None if column is None else column.dtype.names
    if column is None or names is None:
        return None
    if "number" not in names:
        return column
    kept = [name for name in names if name != "number"]
    result = np.empty(len(column), [(name, column.dtype[name]) for name in kept])
    for name in kept:
        result[name] = column[name]
    return result


def split_column(splits: NDArray[np.int64], numbers: NDArray[np.uint64] | None) -> NDArray[Any]:
    """Return a column below the partition boundary: split indices, and element numbers if given."""
    column = np.empty(len(splits), SPLIT_DTYPES[numbers is not None])
    column["split"] = splits
    if numbers is not None:
        column["number"] = numbers
    return column


def id_column(
    splits: NDArray[np.int64] | int,
    ordinals: NDArray[np.int64],
    numbers: NDArray[np.uint64] | None = None,
) -> NDArray[Any]:
    """Return a column of elements with these ids, and element numbers if given."""
    column = np.empty(len(ordinals), ID_DTYPES[numbers is not None])
    column["split"], column["ordinal"] = splits, ordinals
    if numbers is not None:
        column["number"] = numbers
    return column


def has_element_ids(column: NDArray[Any] | None) -> bool:
    """Return whether a column has element ids, as columns above the partition boundary have."""
    names = None if column is None else column.dtype.names
    return names is not None and names[-1] != "split"


def constituent_ids(column: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the splits and ordinals of all elements, or of all their constituents."""
    if "constituents" not in (column.dtype.names or ()):
        return column["split"], column["ordinal"]
    parts = list(column["constituents"])
    rows = np.concatenate(parts) if parts else np.empty((0, 2), np.int64)
    return rows[:, 0], rows[:, 1]


def constituent_counts(column: NDArray[Any]) -> tuple[int, ...]:
    """Return the number of constituents of each element; () if it is the same for all."""
    if "constituents" not in (column.dtype.names or ()):
        return ()
    sizes = tuple(len(rows) for rows in column["constituents"])
    return () if len(set(sizes)) < 2 else sizes


def concatenate_metadata(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the columns joined. If one of them has constituents, the result does."""
    if len(columns) == 1:
        return columns[0]
    dtype = columns[0].dtype
    for column in columns:
        if column.dtype is not dtype and column.dtype != dtype:
            columns = [group_metadata(column, 1) for column in columns]
            dtype = columns[0].dtype
            break
    if dtype.hasobject or dtype.names is None:
        # Given explicitly: finding a dtype for records takes three times as long as copying them.
        return np.concatenate(columns, dtype=dtype, casting="no")
    # Whole records are copied faster than individual fields.
    as_bytes = np.dtype((np.void, dtype.itemsize))
    return np.concatenate([column.view(as_bytes) for column in columns]).view(dtype)


def group_metadata(column: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the column of elements made from `size` elements each; the last may have fewer.

    The element number is that of the first of them.
    """
    if not has_element_ids(column) or (size == 1 and "constituents" in (column.dtype.names or ())):
        return column[::size]
    numbers = element_numbers(column)
    result = np.empty(-(-len(column) // size), _CONSTITUENT_DTYPES[numbers is not None])
    if numbers is not None:
        result["number"] = numbers[::size]
    if "constituents" in (column.dtype.names or ()):
        rows = column["constituents"]
        for index in range(len(result)):
            result["constituents"][index] = np.concatenate(rows[index * size : (index + 1) * size])
        return result
    ids = np.empty((len(column), 2), np.int64)
    ids[:, 0], ids[:, 1] = column["split"], column["ordinal"]
    for index in range(len(result)):
        result["constituents"][index] = ids[index * size : (index + 1) * size]
    return result
