"""Shards as plain values, in the form in which they are saved.

    SavedShard    spec, slot_initial_values    · arrays: value, "optimizer/slot" ...
    SavedTable    spec, step           · arrays: ids, value, seen, last_used, "optimizer/slot" ...
                                         and waiting_ids, waiting_seen, waiting_last_used
    SavedServer   counters, keys       · no arrays

A record is a small `msgspec` struct; its arrays are kept next to it, by name. The first axis of
each array is the row, so shards can be repartitioned by slices and concatenations (`shard_files`).

Write keys belong to a server: they are restored if the server gets its own shards back, and are
meaningless after rows were repartitioned.
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
        spec: Spec of the shard.
        slot_initial_values: Initial value of the elements of each slot.
    """

    spec: ShardSpec
    slot_initial_values: dict[str, float] = {}


class SavedTable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One shard of a table.

    Attributes:
        spec: Spec of the shard.
        step: Highest step that an optimizer had reached.
        slot_initial_values: Initial value of the elements of each slot.
    """

    spec: TableSpec
    step: int = 0
    slot_initial_values: dict[str, float] = {}


class SavedServer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Contents of a server besides its shards.

    Attributes:
        counters: Values of the counters.
        keys: Keys of executed writes.
    """

    counters: dict[str, int] = {}
    keys: KeyState = KeyState()


class ShardSnapshot(NamedTuple, Generic[R]):
    """A record with its arrays."""

    record: R
    arrays: Arrays


class ShardChanges(NamedTuple, Generic[R]):
    """Changes of a shard since a mark.

    Attributes:
        record: Current record of the shard.
        is_complete: Whether `arrays` have all rows; else they have some rows.
        rows: For a variable: rows of the shard. None for a table, whose arrays contain ids.
        removed_ids: For a table: ids that no longer have a row.
        arrays: Values and slots of those rows.
    """

    record: R
    is_complete: bool
    rows: NDArray[np.int64] | None
    removed_ids: NDArray[np.int64] | None
    arrays: Arrays


# --- rows written since a mark, for incremental checkpoints ---------------------------------------


class DirtyRows:
    """The rows of one shard, each with the number of the period in which it was last written.

    Periods are counted from 0, and each mark begins one. Period 0 records nothing, so there is no
    cost without marks.

    Args:
        period: Current period; the shard is new, so all of it was written in this period.
    """

    def __init__(self, period: int) -> None:
        self._period = period
        self._all_written_in = period
        self._row_periods = np.zeros(0, np.uint32)

    def begin_period(self, period: int) -> None:
        """Begin a period: later writes belong to it."""
        self._period = period

    def mark_all(self) -> None:
        """Record a write of all rows."""
        self._all_written_in = self._period

    def mark_rows(self, rows: NDArray[np.int64], capacity: int) -> None:
        """Record a write of some rows, of `capacity` that exist or may exist."""
        if not self._period:
            return
        if len(self._row_periods) < capacity:
            larger = np.zeros(capacity, np.uint32)
            larger[: len(self._row_periods)] = self._row_periods
            self._row_periods = larger
        self._row_periods[rows] = self._period

    def rows_since(self, mark: int) -> NDArray[np.int64] | None:
        """Return the rows written in periods after `mark`; None means all of them."""
        return None if self._all_written_in > mark else np.flatnonzero(self._row_periods > mark)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._row_periods.nbytes
