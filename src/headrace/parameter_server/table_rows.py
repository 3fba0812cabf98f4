"""Rows by id: one index, and columns that grow together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.row_access import is_floating
from headrace.parameter_server.specs import (
    Constant,
    Initializer,
    Normal,
    Uniform,
    Zeros,
    fill_array,
    working_dtype,
)

__all__ = ["IdIndex", "RowColumn", "TableRows", "fill_initial_values", "initial_rows"]


Ids = NDArray[np.int64]


class RowColumn(NamedTuple):
    """A column: a part of each row.

    Attributes:
        shape: Shape of the part.
        dtype: Dtype of its elements.
        initial_value: Value of a new row.
        with_id: Whether it is stored next to the id, where a search finds it without another cache
            miss; must be an int64 scalar.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    initial_value: float = 0.0
    with_id: bool = False


class TableRows:
    """Ids and their rows, in columns.

    Attributes:
        index: Maps ids to rows.
    """

    def __init__(self, **columns: RowColumn) -> None:
        id_columns = [name for name, column in columns.items() if column.with_id]
        #: Numbers of the columns that the index stores.
        self._id_columns = {name: number for number, name in enumerate(id_columns)}
        self.index: IdIndex = IdIndex(self._grow, len(id_columns))
        self._columns = dict(columns)
        self._arrays = {
            name: _filled(column, 0) for name, column in columns.items() if not column.with_id
        }

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, column: str) -> NDArray[Any]:
        number = self._id_columns.get(column)
        return self._arrays[column] if number is None else self.index.id_column(number)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """Arrays by name, with space for `index.capacity` rows."""
        return {name: self[name] for name in self._columns}

    @property
    def nbytes(self) -> int:
        """Bytes of the index and of all columns."""
        return self.index.nbytes + sum(array.nbytes for array in self._arrays.values())

    def initial_value(self, column: str) -> float:
        """Return the value of a new row in a column."""
        return self._columns[column].initial_value

    def add_column(self, name: str, column: RowColumn) -> None:
        """Add a column to all rows."""
        self._columns[name] = column
        self._arrays[name] = _filled(column, self.index.capacity)

    def find_or_add(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the row of each id, and the new rows, which have initial values."""
        rows, added = self.index.find_or_add(ids)
        for name, column in self._columns.items():
            # A new row may reuse a freed one.
            self[name][added] = column.initial_value
        return rows, added

    def least_recently_used(self, count: int, exclude: Ids) -> Ids:
        """Return the `count` rows with the smallest "last_used", in no particular order.

        Ties are resolved by the smallest "seen", then by id, so the choice does not depend on the
        position of a row.

        Args:
            count: Number of rows.
            exclude: Rows to exclude.
        """
        excluded = np.zeros(self.index.capacity, bool)
        excluded[exclude] = True
        rows = self.index.rows()
        rows = rows[~excluded[rows]]
        if count >= len(rows):
            return rows
        if count < 1:
            return rows[:0]
        last_used = self["last_used"][rows]
        last = np.partition(last_used, count - 1)[count - 1]
        older = rows[last_used < last]
        tied = rows[last_used == last]
        order = np.lexsort((self.index.ids_of(tied), self["seen"][tied]))
        return np.concatenate([older, tied[order[: count - len(older)]]])

    def _grow(self, capacity: int) -> None:
        for name, array in self._arrays.items():
            if len(array) < capacity:
                larger = _filled(self._columns[name], capacity)
                larger[: len(array)] = array
                self._arrays[name] = larger


def _filled(column: RowColumn, capacity: int) -> NDArray[Any]:
    return fill_array((capacity, *column.shape), column.initial_value, column.dtype)


# --- index from ids to rows: open addressing, vectorized over many ids ----------------------------

# Slots hold row numbers, rows hold their ids. The search for an id begins at the slot of its hash
# and continues with the next slots until the id or a never-used slot is found. All ids of a call
# are searched together; each iteration handles the ids that remain. The number of slots is a power
# of two, and at most 5/8 of them are in use.
#
# A freed row is reused for one of the next ids, so rows stay dense.

_NEVER_USED = -1
_FREED = -2
_FEWEST_SLOTS = 16
_ODD = np.uint64(0x9E3779B97F4A7C15)


class IdIndex:
    """Rows for int64 ids.

    Args:
        grow: Called with the new capacity before rows beyond the old one are assigned.
        num_columns: Number of integers stored next to each id. The rows of a large table are not in
            the CPU caches, so a search for an id loads these at no extra cost.

    Attributes:
        used: Rows below this number have been assigned.
    """

    def __init__(
        self, grow: Callable[[int], None] = lambda capacity: None, num_columns: int = 0
    ) -> None:
        self._on_grow = grow
        self.used: int = 0
        #: Id of each row, followed by the integers stored next to it.
        self._rows = np.zeros((0, 1 + num_columns), np.int64)
        self._live = np.zeros(0, bool)
        self._free = np.zeros(0, np.int64)
        self._make_slots(_FEWEST_SLOTS)

    def __len__(self) -> int:
        return self.used - len(self._free)

    @property
    def _ids(self) -> Ids:
        return self._rows[:, 0]

    def id_column(self, number: int) -> Ids:
        """Return a writable column of the integers next to the ids, for all rows.

        The view is valid until the capacity grows.
        """
        return self._rows[:, 1 + number]

    @property
    def capacity(self) -> int:
        """Number of rows that parallel arrays should have space for; it grows by doubling."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(part.nbytes for part in (self._slots, self._rows, self._live, self._free))

    def rows(self) -> Ids:
        """Return the rows that have an id, in ascending order."""
        return np.flatnonzero(self._live[: self.used])

    def ids_of(self, rows: Ids) -> Ids:
        """Return the ids of rows that have one."""
        return self._ids[rows]

    def find(self, ids: Ids) -> Ids:
        """Return the row of each id, -1 for ids without one."""
        return self._probe(ids)[1]

    def find_or_add(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the row of each id, and the rows that are new.

        An id that occurs several times gets one row.
        """
        rows = self.find(ids)
        missing = np.flatnonzero(rows < 0)
        if not len(missing):
            return rows, np.zeros(0, np.int64)
        absent = ids[missing]
        if len(absent) == 1 or (absent[1:] > absent[:-1]).all():
            rows[missing] = added = self.add(absent)
        else:
            added = self.add(np.unique(absent))
            rows[missing] = self.find(absent)
        return rows, added

    def add(self, ids: Ids) -> Ids:
        """Return new rows for distinct ids that have none."""
        reused = min(len(ids), len(self._free))
        new_rows = np.arange(self.used, self.used + len(ids) - reused)
        rows = np.concatenate([self._free[len(self._free) - reused :][::-1], new_rows])
        # Allocate first: if that fails, nothing has changed.
        self._grow_rows(self.used + len(new_rows))
        needs_rehash = (self._filled + len(ids)) * 8 > len(self._slots) * 5
        if needs_rehash:
            # Twice the needed size; the freed slots disappear.
            min_slots = max(_FEWEST_SLOTS, (len(self) + len(ids)) * 2)
            self._make_slots(1 << (min_slots - 1).bit_length())
        self._free = self._free[: len(self._free) - reused]
        self.used += len(new_rows)
        self._ids[rows] = ids
        self._live[rows] = True
        self._place(self.rows() if needs_rehash else rows)
        return rows

    def remove(self, ids: Ids) -> Ids:
        """Remove distinct ids, and return the rows of those that had one."""
        slots, rows = self._probe(ids)
        has_row = rows >= 0
        rows = rows[has_row]
        self._slots[slots[has_row]] = _FREED
        self._live[rows] = False
        self._free = np.concatenate([self._free, rows])
        return rows

    def _make_slots(self, count: int) -> None:
        self._slots = np.full(count, _NEVER_USED, np.int32)
        #: Number of slots that are not _NEVER_USED.
        self._filled = 0
        self._shift = np.uint64(64 - (count.bit_length() - 1))

    def _grow_rows(self, used: int) -> None:
        if used > self.capacity:
            capacity = 1 << max(3, (used - 1).bit_length())
            self._on_grow(capacity)
            # Both are allocated before either is assigned, in case memory suffices for only one.
            self._rows, self._live = _longer(self._rows, capacity), _longer(self._live, capacity)

    def _home(self, ids: Ids) -> Ids:
        # The high bits of the product depend on all bits of the id.
        return ((ids.view(np.uint64) * _ODD) >> self._shift).view(np.int64)

    def _probe(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return for each id the slot where its search ended, and its row or -1."""
        slots = self._home(ids)
        if not self.capacity:
            return slots, np.full(len(ids), -1, np.int64)
        rows = self._slots.take(slots, mode="clip").astype(np.int64)
        # A slot without a row reads the id of row 0, hence the second condition. `take` needs
        # contiguous memory; indexing a column takes twice as long.
        flat, width = self._rows.reshape(-1), self._rows.shape[1]
        pending = np.flatnonzero((flat.take(rows * width, mode="clip") != ids) | (rows < 0))
        pending = pending[rows[pending] != _NEVER_USED]
        positions, pending_ids = slots[pending], ids[pending]
        last = len(self._slots) - 1
        while len(pending):
            positions = (positions + 1) & last
            found = self._slots.take(positions, mode="clip").astype(np.int64)
            is_other = flat.take(found * width, mode="clip") != pending_ids
            continues = (is_other | (found < 0)) & (found != _NEVER_USED)
            done = ~continues
            rows[pending[done]], slots[pending[done]] = found[done], positions[done]
            pending, positions, pending_ids = (
                pending[continues],
                positions[continues],
                pending_ids[continues],
            )
        return slots, rows

    def _place(self, rows: Ids) -> None:
        """Assign slots to rows whose ids have none."""
        self._filled += len(rows)
        positions, last = self._home(self._ids[rows]), len(self._slots) - 1
        while len(rows):
            # If several rows want one slot, the last one gets it. Freed slots stay freed: the probe
            # sequence of another id may pass over them.
            open_slots = self._slots.take(positions, mode="clip") == _NEVER_USED
            self._slots[positions[open_slots]] = rows[open_slots]
            unplaced = self._slots.take(positions, mode="clip") != rows
            rows, positions = rows[unplaced], (positions[unplaced] + 1) & last


def _longer(array: NDArray[Any], capacity: int) -> NDArray[Any]:
    larger = np.zeros((capacity, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


# --------------------------------------------------------------------------------------------------
# Initial values of rows: each element depends on the seed, the row or id, and the column only

# So a row has the same initial values whatever happened before, whichever client asks for it, and
# however many shards there are.


def initial_rows(
    initializer: Initializer, rows: NDArray[np.int64], columns: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return the initial values of rows.

    Args:
        initializer: The initializer.
        rows: Row numbers or ids, 1-D.
        columns: Number of elements in a row.
        dtype: Dtype of the values; those of less than 32 bits are rounded from float32.

    Returns:
        An array of shape `(len(rows), columns)`.
    """
    values = np.empty((len(rows), columns), dtype)
    match initializer:
        case Zeros():
            values[...] = 0
        case Constant(value):
            values[...] = value
        case _:
            block = max(1, _BLOCK // max(1, columns))
            for start in range(0, len(rows), block):
                part = slice(start, start + block)
                values[part] = (
                    _uniform(initializer, rows[part], columns, dtype)
                    if isinstance(initializer, Uniform)
                    else _normal(initializer, rows[part], columns)
                )
    return values


def _uniform(
    initializer: Uniform, rows: NDArray[np.int64], columns: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    span = initializer.high - initializer.low
    if is_floating(dtype) and working_dtype(dtype).itemsize == 4:
        # Two values from each 64 bits: float32 holds only 24 of 32 bits.
        halves = _bits(initializer.seed, rows, (columns + 1) // 2).view(np.uint32)[:, :columns]
        even = (halves >> np.uint32(8)).view(np.int32).astype(np.float32)
        even *= np.float32(span * 2.0**-24)
    else:
        even = (_bits(initializer.seed, rows, columns) >> np.uint64(11)).astype(np.float64)
        even *= span * 2.0**-53
    even += initializer.low
    return even


def _normal(initializer: Normal, rows: NDArray[np.int64], columns: int) -> NDArray[Any]:
    bits = _bits(initializer.seed, rows, columns)
    # Box-Muller: the high half of the bits gives the distance, the low half the angle.
    distance = ((bits >> _HALF).astype(np.float64) + 1) * 2.0**-32
    angle = (bits & _LOW).astype(np.float64) * (2 * math.pi * 2.0**-32)
    spread: NDArray[Any] = np.sqrt(-2 * np.log(distance)) * np.cos(angle)
    spread *= initializer.stddev
    spread += initializer.mean
    return spread


def fill_initial_values(values: NDArray[Any], initializer: Initializer, first_row: int) -> None:
    """Write initial values into a shard that begins at row `first_row` of its variable."""
    if not values.size:
        return
    flat = values.reshape(len(values) if values.ndim else 1, -1)
    block = max(1, _BLOCK // flat.shape[1])
    for start in range(0, len(flat), block):
        part = flat[start : start + block]
        rows = np.arange(first_row + start, first_row + start + len(part))
        part[...] = initial_rows(initializer, rows, flat.shape[1], values.dtype)


def _bits(seed: int, rows: NDArray[np.int64], columns: int) -> NDArray[np.uint64]:
    """Return 64 bits for each element, mixed from the seed, its row and its column."""
    begin = _mix(np.uint64(seed & _ALL) + _ODD * np.arange(1, columns + 1, dtype=np.uint64))
    return _mix(_mix(rows.view(np.uint64) + _ODD)[:, None] ^ begin)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number, in place (the finalizer of MurmurHash3)."""
    shifted = bits >> _SHIFT
    bits ^= shifted
    bits *= np.uint64(0xFF51AFD7ED558CCD)
    np.right_shift(bits, _SHIFT, out=shifted)
    bits ^= shifted
    bits *= np.uint64(0xC4CEB9FE1A85EC53)
    np.right_shift(bits, _SHIFT, out=shifted)
    bits ^= shifted
    return bits


_ALL = 2**64 - 1
_SHIFT = np.uint64(33)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_BLOCK = 16_384
