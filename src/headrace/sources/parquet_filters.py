"""Filters of Parquet files: which row groups may contain matching rows, and which rows match.

A filter is a list of conjunctions, as in pyarrow: `[[("x", ">", 3), ("y", "==", "a")], ...]`. A row
matches if one of them holds. A null matches `not in`, and no other comparison.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.saved.arrow import pyarrow, pyarrow_module

__all__ = ["Filters", "check_filters", "filter_columns", "matching_groups", "matching_rows"]

Filters: TypeAlias = tuple[tuple[tuple[str, str, Any], ...], ...]
"""Conjunctions of predicates `(column, operator, value)`; a row matches if one of them holds."""

_OPERATORS = ("=", "==", "!=", "<", ">", "<=", ">=", "in", "not in")


def check_filters(filters: Sequence[Any] | None) -> Filters | None:
    """Return filters as tuples.

    Raises:
        TypeError, ValueError: If they are not a list of predicates, or a list of such lists.
    """
    if filters is None:
        return None
    if isinstance(filters, str) or not isinstance(filters, Sequence):
        raise _invalid_filters_error(filters)
    conjunctions = [filters] if any(_is_predicate(item) for item in filters) else filters
    if not conjunctions or not all(conjunctions):
        raise ValueError(f"`filters` must not be empty, but got {filters!r}; use None for all rows")
    result = []
    for conjunction in conjunctions:
        if not isinstance(conjunction, list | tuple) or not all(map(_is_predicate, conjunction)):
            raise _invalid_filters_error(filters)
        for _, operator, value in conjunction:
            if operator not in _OPERATORS:
                raise ValueError(
                    f"`filters` has the operator {operator!r}, but must have one of "
                    f"{', '.join(_OPERATORS)}"
                )
            if "in" in operator and not isinstance(value, list | tuple | set | frozenset):
                raise TypeError(
                    f"`filters` must have a list, tuple or set after {operator!r}, but got "
                    f"{value!r}"
                )
        result.append(tuple(tuple(predicate) for predicate in conjunction))
    return tuple(result)


def _is_predicate(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 3 and isinstance(item[0], str)


def _invalid_filters_error(filters: Any) -> TypeError:
    return TypeError(
        '`filters` must be a list such as [("x", ">", 3)], or a list of such lists, but got '
        f"{filters!r:.100}"
    )


def filter_columns(filters: Filters | None) -> tuple[str, ...]:
    """Return the names of the columns that filters use."""
    used = [column for conjunction in filters or () for column, _, _ in conjunction]
    return tuple(dict.fromkeys(used))


def matching_groups(name: str, fragment: Any, filters: Filters | None) -> list[int]:
    """Return the numbers of a file's row groups that statistics do not exclude.

    Args:
        name: Name of the file, for errors.
        fragment: The file as a pyarrow dataset fragment.
        filters: The filters; None matches all rows.

    Raises:
        InvalidArgumentError: If the filters do not fit the types of the columns.
    """
    if filters is None:
        return list(range(fragment.metadata.num_row_groups))
    schema = fragment.physical_schema
    try:
        matching_rows(schema.empty_table(), filters)
        parts = fragment.split_by_row_group(_expression(filters), schema=schema)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InvalidArgumentError(
            f"`filters` do not fit the columns of {name!r}: {error}"
        ) from error
    return [group.id for part in parts for group in part.row_groups]


def matching_rows(rows: Any, filters: Filters) -> NDArray[np.int64]:
    """Return the indices of the matching rows of a record batch or table."""
    acero = pyarrow_module("acero", "filtering rows")
    table = rows.select(filter_columns(filters))
    if not hasattr(table, "to_batches"):
        table = pyarrow().Table.from_batches([table])
    # One thread, which keeps the order.
    mask = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
            acero.Declaration("project", acero.ProjectNodeOptions([_expression(filters)], ["m"])),
        ]
    ).to_table(use_threads=False)["m"]
    return np.flatnonzero(mask.fill_null(False).to_numpy())


@functools.lru_cache(16)
def _cached_expression(filters: Filters) -> Any:
    parquet = pyarrow_module("parquet", "filtering rows")
    return parquet.filters_to_expression([list(conjunction) for conjunction in filters])


def _expression(filters: Filters) -> Any:
    try:
        return _cached_expression(filters)
    except TypeError:  # a value that is not hashable, such as a list
        return _cached_expression.__wrapped__(filters)
