"""Rows by id, with columns that grow together: one index, and an array for each thing a row has."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.parameter_server.id_table import IdTable

__all__ = ["Column", "TableRows"]

Ids = NDArray[np.int64]


class Column(NamedTuple):
    """What each row has one of.

    Attributes:
        shape: Of the part of a row.
        dtype: Of its elements.
        first: What a new row begins with.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    first: float = 0.0


class TableRows:
    """Ids and their rows, in columns.

    Attributes:
        index: Which row an id has.
        columns: Arrays by name, with room for `index.room` rows.
    """

    def __init__(self, **columns: Column) -> None:
        self.index = IdTable(self._grow)
        self.columns: dict[str, NDArray[Any]] = {}
        self._kinds: dict[str, Column] = {}
        for name, column in columns.items():
            self.add_column(name, column)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self.columns[column]

    @property
    def nbytes(self) -> int:
        """Bytes of the index and of all columns."""
        return self.index.nbytes + sum(column.nbytes for column in self.columns.values())

    def first(self, column: str) -> float:
        """Return what a new row has in a column."""
        return self._kinds[column].first

    def add_column(self, name: str, column: Column) -> None:
        """Give each row one thing more."""
        self._kinds[name] = column
        self.columns[name] = _filled(column, self.index.room)

    def find_or_add(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the row of each id, and those that are new; these have first values."""
        rows, added = self.index.find_or_add(ids)
        for name, column in self._kinds.items():
            # Rows that were freed are used again.
            self.columns[name][added] = column.first
        return rows, added

    def remove(self, ids: Ids) -> Ids:
        """Forget ids, and return the rows they had."""
        return self.index.remove(ids)

    def oldest(self, count: int, touched: str, seen: str, but: Ids) -> Ids:
        """Return so many rows that were touched longest ago, in no order.

        Of those that were touched at one time, the ones seen least go first, then by id: so the
        choice does not depend on where a row lies.

        Args:
            count: How many.
            touched: The column that says when.
            seen: The column that says how often.
            but: Rows that are not to be among them.
        """
        spared = np.zeros(self.index.room, bool)
        spared[but] = True
        rows = self.index.rows()
        rows = rows[~spared[rows]]
        if count >= len(rows):
            return rows
        if count < 1:
            return rows[:0]
        when = self[touched][rows]
        last = np.partition(when, count - 1)[count - 1]
        surely = rows[when < last]
        tied = rows[when == last]
        order = np.lexsort((self.index.ids_of(tied), self[seen][tied]))
        return np.concatenate([surely, tied[order[: count - len(surely)]]])

    def _grow(self, room: int) -> None:
        for name, column in self._kinds.items():
            held = self.columns[name]
            if len(held) < room:
                larger = _filled(column, room)
                larger[: len(held)] = held
                self.columns[name] = larger


def _filled(column: Column, room: int) -> NDArray[Any]:
    shape = (room, *column.shape)
    # Zeros take no memory until they are written.
    return (
        np.full(shape, column.first, column.dtype)
        if column.first
        else np.zeros(shape, column.dtype)
    )
