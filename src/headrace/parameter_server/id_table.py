"""Which row an id has: open addressing, for many ids at a time.

Slots hold numbers of rows, rows hold their ids. An id begins at the slot that its hash names and
goes on to the next until it is found or a slot was never used; all ids of a call go together, and
each round is for those that are left. The number of slots is a power of two, and more than 5/8 are
never in use.

A row that is freed is used again by one of the next ids, so rows stay dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["IdTable"]

Ids = NDArray[np.int64]

_NEVER_USED = -1
_FREED = -2
_FEWEST_SLOTS = 16
_ODD = np.uint64(0x9E3779B97F4A7C15)


class IdTable:
    """Rows for int64 ids.

    Args:
        grow: Called with the new room before a row is given out for which there was none.
        beside: How many whole numbers lie beside each id. In a large table no row is in the
            processor's caches: who looks for an id then has these as well.

    Attributes:
        used: Rows below this number have been given out.
    """

    def __init__(self, grow: Callable[[int], None] = lambda room: None, beside: int = 0) -> None:
        self._grow_beside = grow
        self.used = 0
        #: Of each row its id, and the numbers beside that.
        self._rows = np.zeros((0, 1 + beside), np.int64)
        self._live = np.zeros(0, bool)
        self._free = np.zeros(0, np.int64)
        self._make_slots(_FEWEST_SLOTS)

    def __len__(self) -> int:
        return self.used - len(self._free)

    @property
    def _ids(self) -> Ids:
        return self._rows[:, 0]

    def beside(self, number: int) -> Ids:
        """Return one of the numbers beside the ids, of all rows, to be read and written.

        It is this memory until the room grows.
        """
        return self._rows[:, 1 + number]

    @property
    def room(self) -> int:
        """How many rows arrays beside this should have room for; it grows by doubling."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(part.nbytes for part in (self._slots, self._rows, self._live, self._free))

    def rows(self) -> Ids:
        """Return the rows that have an id, rising."""
        return np.flatnonzero(self._live[: self.used])

    def ids_of(self, rows: Ids) -> Ids:
        """Return the ids of rows that have one."""
        return self._ids[rows]

    def find(self, ids: Ids) -> Ids:
        """Return the row of each id, -1 where it has none."""
        return self._probe(ids)[1]

    def find_or_add(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the row of each id, and the rows that were given out for it.

        An id that stands there twice gets one row.
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
        """Return new rows for ids that have none, each of them once."""
        again = min(len(ids), len(self._free))
        fresh = np.arange(self.used, self.used + len(ids) - again)
        rows = np.concatenate([self._free[len(self._free) - again :][::-1], fresh])
        # Memory first: where there is none left, nothing has changed.
        self._grow_rows(self.used + len(fresh))
        crowded = (self._filled + len(ids)) * 8 > len(self._slots) * 5
        if crowded:
            # Twice what is needed, and freed slots are gone.
            wanted = max(_FEWEST_SLOTS, (len(self) + len(ids)) * 2)
            self._make_slots(1 << (wanted - 1).bit_length())
        self._free = self._free[: len(self._free) - again]
        self.used += len(fresh)
        self._ids[rows] = ids
        self._live[rows] = True
        self._place(self.rows() if crowded else rows)
        return rows

    def remove(self, ids: Ids) -> Ids:
        """Forget ids, each of them once, and return the rows that those had which had one."""
        slots, rows = self._probe(ids)
        there = rows >= 0
        rows = rows[there]
        self._slots[slots[there]] = _FREED
        self._live[rows] = False
        self._free = np.concatenate([self._free, rows])
        return rows

    def _make_slots(self, count: int) -> None:
        self._slots = np.full(count, _NEVER_USED, np.int32)
        #: Slots that are not _NEVER_USED.
        self._filled = 0
        self._shift = np.uint64(64 - (count.bit_length() - 1))

    def _grow_rows(self, used: int) -> None:
        if used > self.room:
            room = 1 << max(3, (used - 1).bit_length())
            self._grow_beside(room)
            # Both before either is put in place: there may be memory for one alone.
            self._rows, self._live = _longer(self._rows, room), _longer(self._live, room)

    def _home(self, ids: Ids) -> Ids:
        # The high bits of a product depend on all bits of the id.
        return ((ids.view(np.uint64) * _ODD) >> self._shift).view(np.int64)

    def _probe(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return for each id the slot where its search ended, and its row or -1."""
        slots = self._home(ids)
        if not self.room:
            return slots, np.full(len(ids), -1, np.int64)
        rows = self._slots.take(slots, mode="clip").astype(np.int64)
        # A slot without a row reads the id of row 0: hence the second condition. `take` wants whole
        # memory; an index into a column takes twice as long.
        held, width = self._rows.reshape(-1), self._rows.shape[1]
        going = np.flatnonzero((held.take(rows * width, mode="clip") != ids) | (rows < 0))
        going = going[rows[going] != _NEVER_USED]
        at, left = slots[going], ids[going]
        last = len(self._slots) - 1
        while len(going):
            at = (at + 1) & last
            found = self._slots.take(at, mode="clip").astype(np.int64)
            is_other = held.take(found * width, mode="clip") != left
            on = (is_other | (found < 0)) & (found != _NEVER_USED)
            done = ~on
            rows[going[done]], slots[going[done]] = found[done], at[done]
            going, at, left = going[on], at[on], left[on]
        return slots, rows

    def _place(self, rows: Ids) -> None:
        """Put rows whose ids have no slot into slots."""
        self._filled += len(rows)
        at, last = self._home(self._ids[rows]), len(self._slots) - 1
        while len(rows):
            # Of those that want one slot the last takes it. Freed slots stay freed: an id further
            # on in their chain was found over them.
            open_slots = self._slots.take(at, mode="clip") == _NEVER_USED
            self._slots[at[open_slots]] = rows[open_slots]
            on = self._slots.take(at, mode="clip") != rows
            rows, at = rows[on], (at[on] + 1) & last


def _longer(held: NDArray[Any], room: int) -> NDArray[Any]:
    larger = np.zeros((room, *held.shape[1:]), held.dtype)
    larger[: len(held)] = held
    return larger
