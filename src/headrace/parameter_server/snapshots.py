"""What is saved of a store, and how a store gets it back: whole, and what changed since a mark.

    for name in holdings(store):
        saved = snapshot_of(store, name)      between two operations: each shard is whole
    restore(store, saved)

    period = mark(store)
    changes = changes_of(store, name, period)

Arrays of a snapshot are the store's own: who writes them later, or elsewhere, copies them first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import NotFoundError
from headrace.parameter_server.array_shard import ArrayShard, check_value
from headrace.parameter_server.saved import (
    Changes,
    Saved,
    SavedServer,
    SavedShard,
    SavedTable,
    Touched,
)
from headrace.parameter_server.store import Store
from headrace.parameter_server.table_shard import TableShard, slot_column
from headrace.parameter_server.write_keys import WriteKeys

__all__ = [
    "Holding",
    "changes_of",
    "forget_removed",
    "holdings",
    "mark",
    "part_of",
    "part_of_saved",
    "put",
    "restore",
    "rows_of",
    "snapshot_of",
    "snapshot_of_server",
    "touched_bytes",
]


class Holding(NamedTuple):
    """One thing that a store holds: `kind` is shard or table."""

    kind: str
    name: str


def holdings(store: Store) -> list[Holding]:
    """Return what there is to save, beside what `snapshot_of_server` has."""
    return [
        *(Holding("shard", name) for name in store.shards),
        *(Holding("table", name) for name in store.tables),
    ]


def snapshot_of_server(store: Store) -> Saved[SavedServer]:
    """Return counters and keys."""
    record = SavedServer(counters=dict(store.counters), keys=store.keys.state())
    return Saved(record, {})


def snapshot_of(store: Store, holding: Holding) -> Saved[Any]:
    """Return a shard or table as it is now.

    Raises:
        NotFoundError: There is none.
    """
    part = _find(store, holding)
    if isinstance(part, ArrayShard):
        return Saved(_shard_record(part), {"value": part.value, **part.slots})
    rows = part.rows.index.rows()
    return Saved(_table_record(part), {**_rows(part, rows), **_waiting(part)})


def rows_of(store: Store, holding: Holding) -> tuple[int, int]:
    """Return how many rows a shard or table has, and the bytes of one with its slots.

    Of a table, rows that ids lost are counted as well.
    """
    part = _find(store, holding)
    if isinstance(part, ArrayShard):
        held = [part.value, *part.slots.values()]
        rows = len(part.value) if part.value.ndim else 1
        return rows, sum(array.nbytes for array in held) // max(1, rows) or 1
    return part.rows.index.used, 8 + sum(
        column.nbytes // max(1, len(column)) for column in part.rows.columns.values()
    )


def touched_bytes(store: Store, holding: Holding, since: int | None) -> tuple[int, bool]:
    """Return how many bytes were written since a mark (None: ever), and whether that is all."""
    rows, row_bytes = rows_of(store, holding)
    touched = None if since is None else _find(store, holding).touched.since(since)
    return (rows if touched is None else len(touched)) * row_bytes, touched is None


def part_of(store: Store, holding: Holding, start: int, stop: int) -> Saved[Any]:
    """Return some rows of a shard or table as they are now.

    Of a table, ids that wait for admission are left out.
    """
    part = _find(store, holding)
    if isinstance(part, ArrayShard):
        arrays = {"value": part.value, **part.slots}
        return Saved(
            _shard_record(part), {name: array[start:stop] for name, array in arrays.items()}
        )
    rows = part.rows.index.rows()
    first, last = np.searchsorted(rows, (start, stop))
    return Saved(_table_record(part), _rows(part, rows[first:last]))


def mark(store: Store) -> int:
    """Begin another period, and return the one that ended: what is written now comes after it."""
    ended = store.period
    store.period += 1
    for shard in store.shards.values():
        shard.touched.begin(store.period)
    for table in store.tables.values():
        table.begin(store.period)
    return ended


def changes_of(store: Store, holding: Holding, since: int) -> Changes[Any]:
    """Return what was written of a shard or table after a mark.

    Args:
        store: Which store.
        holding: What of it.
        since: What `mark` returned.
    """
    part = _find(store, holding)
    rows = part.touched.since(since)
    if isinstance(part, ArrayShard):
        arrays = {"value": part.value, **part.slots}
        if rows is None:
            return Changes(_shard_record(part), True, None, None, arrays)
        # A single number is written whole: here none of it was.
        written = {name: np.atleast_1d(array)[rows] for name, array in arrays.items()}
        return Changes(_shard_record(part), False, rows, None, written)
    record = _table_record(part)
    live = part.rows.index.rows()
    if rows is None:
        return Changes(record, True, None, None, {**_rows(part, live), **_waiting(part)})
    # A row that was freed was written before that.
    rows = rows[np.isin(rows, live, assume_unique=True)]
    return Changes(
        record, False, None, part.removed_since(since), {**_rows(part, rows), **_waiting(part)}
    )


def forget_removed(store: Store, until: int) -> None:
    """Forget which ids were removed in periods up to a mark: no increment will ask for them."""
    for table in store.tables.values():
        table.removed = [(period, ids) for period, ids in table.removed if period > until]


def restore(store: Store, saved: Saved[Any]) -> None:
    """Put back what was saved; what is there under its name is replaced.

    Arrays are copied.

    Raises:
        InvalidArgumentError: A value does not fit its spec.
    """
    record, arrays = saved
    if isinstance(record, SavedServer):
        store.counters = dict(record.counters)
        store.keys = WriteKeys(record.keys)
    elif isinstance(record, SavedShard):
        copies = {name: np.array(array, order="C", copy=True) for name, array in arrays.items()}
        put(store, part_of_saved(Saved(record, copies)))
    else:
        put(store, part_of_saved(saved))


def part_of_saved(saved: Saved[Any]) -> ArrayShard | TableShard:
    """Return what was saved as it is kept; a shard of a variable takes the arrays as they are.

    Raises:
        InvalidArgumentError: A value does not fit its spec.
    """
    record, arrays = saved
    if isinstance(record, SavedTable):
        return _table_of(record, arrays)
    value = arrays["value"]
    check_value(record.spec, value)
    shard = ArrayShard(record.spec, value, 0)
    shard.slots = {name: array for name, array in arrays.items() if name != "value"}
    shard.slot_firsts = dict(record.slot_firsts)
    return shard


def put(store: Store, part: ArrayShard | TableShard) -> None:
    """Have a store keep a shard or table, in place of what is there under its name."""
    if isinstance(part, ArrayShard):
        part.touched = Touched(store.period)
        store.shards[part.spec.name] = part
    else:
        part.touched = Touched(store.period)
        part.begin(store.period)
        store.tables[part.spec.name] = part


def _table_of(record: SavedTable, arrays: Mapping[str, NDArray[Any]]) -> TableShard:
    table = TableShard(record.spec, 0)
    table.step = record.step
    for name, first in record.slot_firsts.items():
        shape = arrays[name].shape[1:]
        table.rows.add_column(name, slot_column(shape, table.dtype, first))
    rows, _ = table.rows.find_or_add(np.ascontiguousarray(arrays["ids"]))
    for name in table.rows.columns:
        table.rows[name][rows] = arrays[name]
    waiting, _ = table.waiting.find_or_add(np.ascontiguousarray(arrays["waiting_ids"]))
    for name in table.waiting.columns:
        table.waiting[name][waiting] = arrays[f"waiting_{name}"]
    return table


def _shard_record(shard: ArrayShard) -> SavedShard:
    return SavedShard(spec=shard.spec, slot_firsts=dict(shard.slot_firsts))


def _table_record(table: TableShard) -> SavedTable:
    firsts = {name: table.rows.first(name) for name in table.slots}
    return SavedTable(spec=table.spec, step=table.step, slot_firsts=firsts)


def _rows(table: TableShard, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    columns = {name: column[rows] for name, column in table.rows.columns.items()}
    return {"ids": table.rows.index.ids_of(rows), **columns}


def _waiting(table: TableShard) -> dict[str, NDArray[Any]]:
    rows = table.waiting.index.rows()
    columns = {f"waiting_{name}": column[rows] for name, column in table.waiting.columns.items()}
    return {"waiting_ids": table.waiting.index.ids_of(rows), **columns}


def _find(store: Store, holding: Holding) -> ArrayShard | TableShard:
    kind, name = holding
    found = store.shards.get(name) if kind == "shard" else store.tables.get(name)
    if found is None:
        raise NotFoundError(f"there is no {kind} {name} on this server")
    return found
