"""Shards as plain values: what is saved of them, cut and joined for other numbers of shards.

    SavedShard    spec, names of slots · arrays: value, "optimizer/slot" ...
    SavedTable    spec, step           · arrays: ids, value, seen, touched, "optimizer/slot" ...
                                         and waiting_ids, waiting_seen, waiting_touched
    SavedServer   counters, keys       · no arrays

A record is small and an `msgspec` struct; arrays travel beside it, by name. Rows stand along the
first axis of each array, so that cutting and joining are slices and concatenations.

Keys belong to a server: they are restored where the server comes back with its own shards, and mean
nothing where rows were dealt again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidArgumentError
from headrace.parameter_server.gradients import shard_of_ids
from headrace.parameter_server.specs import ShardSpec, TableSpec
from headrace.parameter_server.write_keys import KeyState

__all__ = [
    "Changes",
    "Saved",
    "SavedServer",
    "SavedShard",
    "SavedTable",
    "Touched",
    "apply_changes",
    "cut_shards",
    "deal_tables",
    "join_shards",
    "join_tables",
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


class Saved(NamedTuple, Generic[R]):
    """A record and the arrays that belong to it."""

    record: R
    arrays: Arrays


class Changes(NamedTuple, Generic[R]):
    """What was written of a shard since a mark.

    Attributes:
        record: Of the shard, as it is now.
        whole: Whether `arrays` are all of it; else they are some rows.
        rows: Of a variable: which rows of the shard. None for a table, whose arrays name ids.
        removed: Of a table: ids that have no row any more.
        arrays: Values and slots of those rows.
    """

    record: R
    whole: bool
    rows: NDArray[np.int64] | None
    removed: NDArray[np.int64] | None
    arrays: Arrays


# --- variables -----------------------------------------------------------------------------------


def join_shards(shards: Sequence[Saved[SavedShard]]) -> Saved[SavedShard]:
    """Return a variable in one shard.

    Raises:
        InvalidArgumentError: A shard is missing, or they are of several variables.
    """
    ordered = sorted(shards, key=lambda saved: saved.record.spec.row)
    spec = ordered[0].record.spec
    row = 0
    for saved in ordered:
        one = saved.record.spec
        same = (one.variable, one.dtype, one.variable_shape)
        if same != (spec.variable, spec.dtype, spec.variable_shape) or one.row != row:
            raise InvalidArgumentError(
                f"shards do not make up the variable {spec.variable} of shape "
                f"{spec.variable_shape}: after row {row - 1} comes {one.name} with row {one.row}"
            )
        row += one.shape[0] if one.shape else 0
    if spec.variable_shape and row != spec.variable_shape[0]:
        raise InvalidArgumentError(
            f"the variable {spec.variable} has {spec.variable_shape[0]} rows, but only {row} were "
            "saved; a shard is missing"
        )
    whole = ShardSpec(
        name=spec.variable,
        variable=spec.variable,
        shape=spec.variable_shape,
        dtype=spec.dtype,
        variable_shape=spec.variable_shape,
    )
    firsts = _slot_firsts(ordered)
    record = SavedShard(spec=whole, slot_firsts=firsts)
    if len(ordered) == 1:
        return Saved(record, ordered[0].arrays)
    return Saved(
        record, _joined(ordered, [saved.record.spec.shape[0] for saved in ordered], firsts)
    )


def cut_shards(whole: Saved[SavedShard], specs: Sequence[ShardSpec]) -> list[Saved[SavedShard]]:
    """Return shards of a variable that is in one.

    Raises:
        InvalidArgumentError: A shard is of another variable, shape or dtype.
    """
    found = whole.record.spec
    shards = []
    for spec in specs:
        if (spec.variable_shape, spec.dtype) != (found.variable_shape, found.dtype):
            raise InvalidArgumentError(
                f"{spec.variable} has shape {spec.variable_shape} and dtype {spec.dtype}, but the "
                f"saved {found.variable} has {found.variable_shape} and {found.dtype}"
            )
        here = slice(spec.row, spec.row + spec.shape[0]) if spec.shape else ...
        arrays = {name: array[here] for name, array in whole.arrays.items()}
        shards.append(Saved(SavedShard(spec=spec, slot_firsts=whole.record.slot_firsts), arrays))
    return shards


# --- tables --------------------------------------------------------------------------------------


def join_tables(shards: Sequence[Saved[SavedTable]]) -> Saved[SavedTable]:
    """Return a table in one shard; its capacity is that of all together."""
    first = shards[0].record
    firsts = _slot_firsts(shards)
    capacity = first.spec.capacity
    spec = msgspec.structs.replace(
        first.spec,
        name=first.spec.table,
        index=0,
        shards=1,
        capacity=None if capacity is None else capacity * len(shards),
    )
    step = max(saved.record.step for saved in shards)
    lengths = [len(saved.arrays["ids"]) for saved in shards]
    return Saved(
        SavedTable(spec=spec, step=step, slot_firsts=firsts), _joined(shards, lengths, firsts)
    )


def deal_tables(whole: Saved[SavedTable], specs: Sequence[TableSpec]) -> list[Saved[SavedTable]]:
    """Return shards of a table that is in one: each gets the ids that fall to it."""
    found = whole.record
    shards = []
    for spec in specs:
        if (spec.dim, spec.dtype) != (found.spec.dim, found.spec.dtype):
            raise InvalidArgumentError(
                f"{spec.table} has {spec.dim} elements of {spec.dtype} in a row, but the saved "
                f"{found.spec.table} has {found.spec.dim} of {found.spec.dtype}"
            )
        rows = shard_of_ids(whole.arrays["ids"], spec.shards) == spec.index
        waiting = shard_of_ids(whole.arrays["waiting_ids"], spec.shards) == spec.index
        arrays = {
            name: array[waiting if name.startswith("waiting_") else rows]
            for name, array in whole.arrays.items()
        }
        record = SavedTable(spec=spec, step=found.step, slot_firsts=found.slot_firsts)
        shards.append(Saved(record, arrays))
    return shards


# --- increments ----------------------------------------------------------------------------------


def apply_changes(saved: Saved[Any], changes: Changes[Any]) -> Saved[Any]:
    """Return what was saved with what was written after it."""
    if changes.whole:
        return Saved(changes.record, changes.arrays)
    if changes.rows is not None:
        arrays = {name: np.array(array) for name, array in saved.arrays.items()}
        for name, part in changes.arrays.items():
            if name not in arrays:
                arrays[name] = _first_slot(changes.record, name, len(arrays["value"]), part)
            arrays[name][changes.rows] = part
        return Saved(changes.record, arrays)
    assert changes.removed is not None
    gone = np.concatenate([changes.removed, changes.arrays["ids"]])
    kept = ~np.isin(saved.arrays["ids"], gone)
    merged = {}
    for name, part in changes.arrays.items():
        if name.startswith("waiting_"):
            # They are few: all of them are in each increment.
            merged[name] = part
            continue
        before = saved.arrays.get(name)
        if before is None:
            before = _first_slot(changes.record, name, len(kept), part)
        merged[name] = np.concatenate([before[kept], part])
    return Saved(changes.record, merged)


def _slot_firsts(shards: Sequence[Saved[Any]]) -> dict[str, float]:
    return {name: first for saved in shards for name, first in saved.record.slot_firsts.items()}


def _joined(
    shards: Sequence[Saved[Any]], lengths: Sequence[int], firsts: Mapping[str, float]
) -> dict[str, NDArray[Any]]:
    """Return the arrays of shards one after another.

    A slot is made by the first step on a shard; where there was none yet, it has first values.
    """
    examples = {name: array for saved in shards for name, array in saved.arrays.items()}
    return {
        name: np.concatenate(
            [
                saved.arrays[name]
                if name in saved.arrays
                else np.full((length, *example.shape[1:]), firsts[name], example.dtype)
                for saved, length in zip(shards, lengths, strict=True)
            ]
        )
        for name, example in examples.items()
    }


def _first_slot(record: Any, name: str, rows: int, like: NDArray[Any]) -> NDArray[Any]:
    return np.full((rows, *like.shape[1:]), record.slot_firsts[name], like.dtype)


# --- which rows were written since a mark: what an incremental checkpoint has to hold -------------


class Touched:
    """The rows of one shard, each with the number of the period in which it was last written.

    Periods are counted from 0, and each mark begins one. In period 0 nothing is kept: whoever sets
    no mark pays nothing.

    Args:
        period: Now; the shard is new, so all of it was written in this period.
    """

    def __init__(self, period: int) -> None:
        self._period = period
        self._whole = period
        self._rows = np.zeros(0, np.uint32)

    def begin(self, period: int) -> None:
        """Begin a period: what is written from now on belongs to it."""
        self._period = period

    def write_all(self) -> None:
        """Note that all rows were written."""
        self._whole = self._period

    def write(self, rows: NDArray[np.int64], room: int) -> None:
        """Note that rows were written, of `room` that there are or may be."""
        if not self._period:
            return
        if len(self._rows) < room:
            larger = np.zeros(room, np.uint32)
            larger[: len(self._rows)] = self._rows
            self._rows = larger
        self._rows[rows] = self._period

    def since(self, mark: int) -> NDArray[np.int64] | None:
        """Return the rows that were written in later periods than `mark`; None: all of them."""
        return None if self._whole > mark else np.flatnonzero(self._rows > mark)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._rows.nbytes
