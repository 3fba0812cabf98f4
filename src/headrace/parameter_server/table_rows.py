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
        beside_id: Whether it lies beside the row's id, where who looks for that finds it at no
            cost; an int64.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    first: float = 0.0
    beside_id: bool = False


class TableRows:
    """Ids and their rows, in columns.

    Attributes:
        index: Which row an id has.
    """

    def __init__(self, **columns: Column) -> None:
        beside = [name for name, column in columns.items() if column.beside_id]
        #: Columns that the index has, and as which of its numbers.
        self._beside = {name: number for number, name in enumerate(beside)}
        self.index = IdTable(self._grow, len(beside))
        self._kinds = dict(columns)
        self._arrays = {
            name: _filled(column, 0) for name, column in columns.items() if not column.beside_id
        }

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, column: str) -> NDArray[Any]:
        number = self._beside.get(column)
        return self._arrays[column] if number is None else self.index.beside(number)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """Arrays by name, with room for `index.room` rows."""
        return {name: self[name] for name in self._kinds}

    @property
    def nbytes(self) -> int:
        """Bytes of the index and of all columns."""
        return self.index.nbytes + sum(array.nbytes for array in self._arrays.values())

    def first(self, column: str) -> float:
        """Return what a new row has in a column."""
        return self._kinds[column].first

    def add_column(self, name: str, column: Column) -> None:
        """Give each row one thing more."""
        self._kinds[name] = column
        self._arrays[name] = _filled(column, self.index.room)

    def find_or_add(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the row of each id, and those that are new; these have first values."""
        rows, added = self.index.find_or_add(ids)
        for name, column in self._kinds.items():
            # Rows that were freed are used again.
            self[name][added] = column.first
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
        for name, held in self._arrays.items():
            if len(held) < room:
                larger = _filled(self._kinds[name], room)
                larger[: len(held)] = held
                self._arrays[name] = larger


def _filled(column: Column, room: int) -> NDArray[Any]:
    shape = (room, *column.shape)
    # Zeros take no memory until they are written.
    return (
        np.full(shape, column.first, column.dtype)
        if column.first
        else np.zeros(shape, column.dtype)
    )
