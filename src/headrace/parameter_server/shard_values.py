"""Shards as plain values: what is saved of them.

    SavedShard    spec, names of slots · arrays: value, "optimizer/slot" ...
    SavedTable    spec, step           · arrays: ids, value, seen, touched, "optimizer/slot" ...
                                         and waiting_ids, waiting_seen, waiting_touched
    SavedServer   counters, keys       · no arrays

A record is small and an `msgspec` struct; arrays travel beside it, by name. Rows stand along the
first axis of each array, so that other numbers of shards are slices and concatenations
(`shard_writer`).

Keys belong to a server: they are restored where the server comes back with its own shards, and mean
nothing where rows were dealt again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.parameter_server.specs import ShardSpec, TableSpec
from headrace.parameter_server.write_keys import KeyState

__all__ = [
    "DirtyRows",
    "SavedServer",
    "SavedShard",
    "SavedTable",
    "ShardChanges",
    "ShardSnapshot",
]


Arrays = Mapping[str, NDArray[Any]]

R = TypeVar("R")


class SavedShard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One shard of a variable.

    Attributes:
        spec: What it is.
        slot_firsts: What the elements of each slot begin with.
    """

    spec: ShardSpec
    slot_firsts: dict[str, float] = {}


class SavedTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One shard of a table.

    Attributes:
        spec: What it is.
        step: The highest step that an optimizer had reached.
        slot_firsts: What the elements of each slot begin with.
    """

    spec: TableSpec
    step: int = 0
    slot_firsts: dict[str, float] = {}


class SavedServer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a server holds beside its shards.

    Attributes:
        counters: What they are at.
        keys: Writes that were carried out.
    """

    counters: dict[str, int] = {}
    keys: KeyState = KeyState()


class ShardSnapshot(NamedTuple, Generic[R]):
    """A record and the arrays that belong to it."""

    record: R
    arrays: Arrays


class ShardChanges(NamedTuple, Generic[R]):
    """What was written of a shard since a mark.

    Attributes:
        record: Of the shard, as it is now.
        is_complete: Whether `arrays` are all of it; else they are some rows.
        rows: Of a variable: which rows of the shard. None for a table, whose arrays name ids.
        removed_ids: Of a table: ids that have no row any more.
        arrays: Values and slots of those rows.
    """

    record: R
    is_complete: bool
    rows: NDArray[np.int64] | None
    removed_ids: NDArray[np.int64] | None
    arrays: Arrays


# --- which rows were written since a mark: what an incremental checkpoint has to hold -------------


class DirtyRows:
    """The rows of one shard, each with the number of the period in which it was last written.

    Periods are counted from 0, and each mark begins one. In period 0 nothing is kept: whoever sets
    no mark pays nothing.

    Args:
        period: Now; the shard is new, so all of it was written in this period.
    """

    def __init__(self, period: int) -> None:
        self._period = period
        self._all_written_in = period
        self._row_periods = np.zeros(0, np.uint32)

    def begin_period(self, period: int) -> None:
        """Begin a period: what is written from now on belongs to it."""
        self._period = period

    def mark_all(self) -> None:
        """Note that all rows were written."""
        self._all_written_in = self._period

    def mark_rows(self, rows: NDArray[np.int64], capacity: int) -> None:
        """Note that rows were written, of `capacity` that there are or may be."""
        if not self._period:
            return
        if len(self._row_periods) < capacity:
            larger = np.zeros(capacity, np.uint32)
            larger[: len(self._row_periods)] = self._row_periods
            self._row_periods = larger
        self._row_periods[rows] = self._period

    def rows_since(self, mark: int) -> NDArray[np.int64] | None:
        """Return the rows that were written in later periods than `mark`; None: all of them."""
        return None if self._all_written_in > mark else np.flatnonzero(self._row_periods > mark)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._row_periods.nbytes
