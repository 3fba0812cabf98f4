"""The store of one parameter server: executes operations, takes and restores snapshots.

    answer, arrays = store.execute(operation, arrays)

Rule 1. An operation is executed completely, or an error is raised and nothing has changed.
Rule 2. The caller owns the input arrays again once `execute` has returned.
Rule 3. Returned arrays are new, except for `ReadShard`: it returns the shard's own memory,
        read-only, which is valid until the next operation. Callers that need it longer must copy
        it.
Rule 4. A write key is executed once (`write_keys`).

A snapshot is taken between two operations, so each shard in it is consistent. Its arrays, too, are
the store's own: copy them before changing them or using them after the next operation.

    for shard in list_shards(store):
        saved = snapshot_shard(store, shard)
    restore_snapshot(store, saved)

    period = set_mark(store)
    changes = snapshot_changes(store, shard, period)    # rows written since the mark

No thread, socket or clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from headrace.parameter_server import operations as ops
from headrace.parameter_server.array_shard import ArrayShard, check_row_range, check_value
from headrace.parameter_server.shard_values import (
    DirtyRows,
    SavedServer,
    SavedShard,
    SavedTable,
    ShardChanges,
    ShardSnapshot,
)
from headrace.parameter_server.specs import parse_dtype
from headrace.parameter_server.table_rows import fill_initial_values
from headrace.parameter_server.table_shard import TableShard, slot_column
from headrace.parameter_server.write_keys import WriteKeys
from headrace.serving.rpc import Done

__all__ = [
    "ShardId",
    "ShardStore",
    "build_shard",
    "forget_removed_ids",
    "list_shards",
    "measure_dirty_bytes",
    "measure_rows",
    "put_shard",
    "restore_snapshot",
    "set_mark",
    "snapshot_changes",
    "snapshot_rows",
    "snapshot_server",
    "snapshot_shard",
]


Arrays = Sequence[NDArray[Any]]
OperationOutcome = tuple[ops.Answer, Arrays]

_DONE = Done()


class ShardStore:
    """Shards, tables and counters of one server.

    Args:
        allocate: Allocates the arrays that answer `GatherRows`, `LookupIds` and `GatherIds`, given
            a shape and a dtype; for instance in send buffers.

    Attributes:
        shards: Variable shards, by name.
        tables: Table shards, by name.
        counters: Counters, by name.
        write_keys: Keys of executed writes.
        period: Number of marks set (`set_mark`).
        is_restored: Whether it was restored from a checkpoint: missing objects were then not saved.
    """

    def __init__(self, allocate: Callable[..., NDArray[Any]] = np.empty) -> None:
        self.shards: dict[str, ArrayShard] = {}
        self.tables: dict[str, TableShard] = {}
        self.counters: dict[str, int] = {}
        self.write_keys: WriteKeys = WriteKeys()
        self.period = 0
        self.is_restored = False
        self._allocate = allocate

    def execute(self, operation: ops.Operation, arrays: Arrays = ()) -> OperationOutcome:
        """Execute one operation; return its answer and arrays.

        Raises:
            InvalidArgumentError: If the arrays do not fit the operation or its target.
            NotFoundError: If this server lacks the shard or table.
            AlreadyExistsError: If a different shard or table of the name exists.
            AbortedError: If its write key is refused.
        """
        kind = type(operation)
        handler, min_arrays, max_arrays = _HANDLERS[kind]
        if not min_arrays <= len(arrays) <= max_arrays:
            expected = (
                f"{min_arrays}" if min_arrays == max_arrays else f"{min_arrays} to {max_arrays}"
            )
            raise InvalidArgumentError(
                f"{kind.__name__} needs {expected} arrays, but got {len(arrays)}"
            )
        key = getattr(operation, "key", None)
        if key is None:
            return handler(self, operation, arrays)
        target = _target(operation)
        answer = self.write_keys.find_answer(key, target)
        if answer is not None:
            return self._repeat_reply(operation, arrays, answer)
        new_answer, out = handler(self, operation, arrays)
        assert isinstance(new_answer, Done | ops.Counted)
        self.write_keys.record(key, target, new_answer)
        return new_answer, out

    def _repeat_reply(
        self, operation: ops.Operation, arrays: Arrays, answer: Done | ops.Counted
    ) -> OperationOutcome:
        if isinstance(operation, ops.LookupIds):
            return self._lookup(operation, arrays, count=False)
        return answer, ()

    # --- variables -------------------------------------------------------------------------------

    def _create(self, operation: ops.Create, arrays: Arrays) -> OperationOutcome:
        spec = operation.shard
        found = self.shards.get(spec.name)
        if found is not None:
            if found.spec != spec:
                raise AlreadyExistsError(
                    f"there is a shard {spec.name} of dtype {found.spec.dtype} and shape "
                    f"{found.spec.shape}, from row {found.spec.row} of {found.spec.variable} with "
                    f"shape {found.spec.variable_shape}; it cannot be created with dtype "
                    f"{spec.dtype} and shape {spec.shape}, from row {spec.row} of {spec.variable} "
                    f"with shape {spec.variable_shape}: use another name"
                )
            return ops.Created(existed=True), ()
        check_row_range(spec)
        if (operation.initializer is None) != (len(arrays) == 1):
            raise InvalidArgumentError(
                f"shard {spec.name} needs a value or an initializer, but got "
                + ("both" if arrays else "neither")
            )
        if operation.initializer is None:
            check_value(spec, arrays[0])
            value = np.array(arrays[0], order="C", copy=True)
        else:
            value = np.empty(spec.shape, parse_dtype(spec.dtype))
            fill_initial_values(value, operation.initializer, spec.row)
        self.shards[spec.name] = ArrayShard(spec, value, self.period)
        return ops.Created(existed=False), ()

    def _read(self, operation: ops.ReadShard, arrays: Arrays) -> OperationOutcome:
        shard = self._shard(operation.shard)
        value = (shard.read_slot(operation.slot) if operation.slot else shard.value).view()
        value.flags.writeable = False
        return _DONE, (value,)

    def _assign(self, operation: ops.Assign, arrays: Arrays) -> OperationOutcome:
        shard = self._shard(operation.shard)
        if operation.slot:
            shard.assign_slot(operation.slot, operation.initial_value, arrays[0])
        else:
            shard.assign(operation.mode, arrays[0])
        return _DONE, ()

    def _gather(self, operation: ops.GatherRows, arrays: Arrays) -> OperationOutcome:
        return _DONE, (self._shard(operation.shard).gather(arrays[0], self._allocate),)

    def _scatter(self, operation: ops.Scatter, arrays: Arrays) -> OperationOutcome:
        self._shard(operation.shard).scatter(operation.mode, arrays[0], arrays[1])
        return _DONE, ()

    def _apply(self, operation: ops.Apply, arrays: Arrays) -> OperationOutcome:
        shard = self._shard(operation.shard)
        shard.apply(operation.optimizer, operation.rule, operation.step, list(arrays))
        return _DONE, ()

    def _count(self, operation: ops.IncrementCounter, arrays: Arrays) -> OperationOutcome:
        if operation.delta < 0:
            raise InvalidArgumentError(
                f"the counter {operation.counter} cannot decrease, but got delta={operation.delta}"
            )
        before = self.counters.get(operation.counter, 0)
        if before < operation.last_seen and not self.is_restored:
            raise NotFoundError(
                f"the counter {operation.counter} is {before} on this server, but was "
                f"{operation.last_seen} before"
            )
        self.counters[operation.counter] = after = before + operation.delta
        return ops.Counted(before=before, after=after), ()

    # --- tables ----------------------------------------------------------------------------------

    def _create_table(self, operation: ops.CreateTable, arrays: Arrays) -> OperationOutcome:
        spec = operation.table
        found = self.tables.get(spec.name)
        if found is None:
            self.tables[spec.name] = TableShard(spec, self.period)
        elif found.spec != spec:
            others = [
                f"{field}={existing!r} instead of {getattr(spec, field)!r}"
                for field in spec.__struct_fields__
                if (existing := getattr(found.spec, field)) != getattr(spec, field)
            ]
            raise AlreadyExistsError(
                f"there is a table {spec.table} with other settings: {'; '.join(others)}. Use "
                "another name, or the same settings"
            )
        return ops.Created(existed=found is not None), ()

    def _lookup(
        self, operation: ops.LookupIds, arrays: Arrays, *, count: bool = True
    ) -> OperationOutcome:
        counts = arrays[1] if len(arrays) > 1 else None
        table = self._table(operation.table)
        rows = table.lookup(arrays[0], counts, count, self._allocate)
        return _DONE, (self._cast_for_sending(rows, operation.dtype),)

    def _gather_ids(self, operation: ops.GatherIds, arrays: Arrays) -> OperationOutcome:
        table = self._table(operation.table)
        rows = table.gather(arrays[0], self._allocate, initialize=operation.initialize)
        return _DONE, (self._cast_for_sending(rows, operation.dtype),)

    def _cast_for_sending(self, rows: NDArray[Any], dtype: str) -> NDArray[Any]:
        return rows.astype(parse_dtype(dtype), copy=False) if dtype else rows

    def _apply_ids(self, operation: ops.ApplyIds, arrays: Arrays) -> OperationOutcome:
        table = self._table(operation.table)
        table.apply(operation.optimizer, operation.rule, operation.step, *arrays)
        return _DONE, ()

    def _assign_ids(self, operation: ops.AssignIds, arrays: Arrays) -> OperationOutcome:
        self._table(operation.table).assign(arrays[0], arrays[1])
        return _DONE, ()

    def _evict(self, operation: ops.Evict, arrays: Arrays) -> OperationOutcome:
        return ops.Evicted(rows=self._table(operation.table).evict(operation.older_than)), ()

    def _export(self, operation: ops.Export, arrays: Arrays) -> OperationOutcome:
        if operation.limit < 1:
            raise InvalidArgumentError(
                f"`limit` must be at least 1 to export rows of the table {operation.table}, but "
                f"got {operation.limit}"
            )
        table = self._table(operation.table)
        ids, values, following = table.export(operation.start, operation.limit)
        return ops.Exported(next=following, rows=len(table.rows)), (ids, values)

    # --- write keys, terms and descriptions -------------------------------------------------------

    def _forget_write_keys(
        self, operation: ops.ForgetWriteKeys, arrays: Arrays
    ) -> OperationOutcome:
        self.write_keys.forget_closures(
            operation.coordinator_term, operation.closures, operation.below
        )
        return _DONE, ()

    def _fence(self, operation: ops.FenceWrites, arrays: Arrays) -> OperationOutcome:
        self.write_keys.fence(operation.coordinator_term, operation.worker)
        return _DONE, ()

    def _describe(self, operation: ops.DescribeStore, arrays: Arrays) -> OperationOutcome:
        shards = tuple(
            ops.ShardDescription(spec=shard.spec, bytes=shard.nbytes, slots=tuple(shard.slots))
            for shard in self.shards.values()
            if operation.variable in (None, shard.spec.variable)
        )
        tables = tuple(
            ops.TableDescription(
                spec=table.spec,
                rows=len(table.rows),
                waiting_ids=len(table.waiting_ids),
                bytes=table.nbytes,
                slots=tuple(table.slots),
            )
            for table in self.tables.values()
        )
        described = ops.StoreDescription(
            coordinator_term=self.write_keys.coordinator_term,
            shards=shards,
            tables=tables,
            counters=dict(self.counters),
            keys=len(self.write_keys),
            bytes=sum(part.bytes for part in shards) + sum(part.bytes for part in tables),
        )
        return described, ()

    def _shard(self, name: str) -> ArrayShard:
        found = self.shards.get(name)
        if found is None:
            raise NotFoundError(
                f"there is no shard {name} on this server; it has {_list_names(self.shards)}"
            )
        return found

    def _table(self, name: str) -> TableShard:
        found = self.tables.get(name)
        if found is None:
            raise NotFoundError(
                f"there is no table {name} on this server; it has {_list_names(self.tables)}"
            )
        return found


#: For each operation: its method, and the smallest and largest number of arrays.
_HANDLERS: dict[
    type[Any], tuple[Callable[[ShardStore, Any, Arrays], OperationOutcome], int, int]
] = {
    ops.Create: (ShardStore._create, 0, 1),
    ops.ReadShard: (ShardStore._read, 0, 0),
    ops.Assign: (ShardStore._assign, 1, 1),
    ops.GatherRows: (ShardStore._gather, 1, 1),
    ops.Scatter: (ShardStore._scatter, 2, 2),
    ops.Apply: (ShardStore._apply, 1, 3),
    ops.IncrementCounter: (ShardStore._count, 0, 0),
    ops.CreateTable: (ShardStore._create_table, 0, 0),
    ops.LookupIds: (ShardStore._lookup, 1, 2),
    ops.GatherIds: (ShardStore._gather_ids, 1, 1),
    ops.ApplyIds: (ShardStore._apply_ids, 2, 3),
    ops.AssignIds: (ShardStore._assign_ids, 2, 2),
    ops.Evict: (ShardStore._evict, 0, 0),
    ops.Export: (ShardStore._export, 0, 0),
    ops.ForgetWriteKeys: (ShardStore._forget_write_keys, 0, 0),
    ops.FenceWrites: (ShardStore._fence, 0, 0),
    ops.DescribeStore: (ShardStore._describe, 0, 0),
}


def _target(operation: Any) -> str:
    """Return the target of a write; a shard, a table and a counter may have the same name."""
    for kind in ("shard", "table", "counter"):
        name = getattr(operation, kind, None)
        if name is not None:
            return f"{kind} {name}"
    raise TypeError(f"{type(operation).__name__} has no shard, table or counter")


def _list_names(names: Any) -> str:
    known = sorted(names)
    text = ", ".join(known[:8]) or "none"
    return text if len(known) <= 8 else f"{text} and {len(known) - 8} more"


# --- snapshots ------------------------------------------------------------------------------------


class ShardId(NamedTuple):
    """Identity of a shard in a store; `kind` is "shard" (of a variable) or "table"."""

    kind: str
    name: str


def list_shards(store: ShardStore) -> list[ShardId]:
    """Return the ids of all shards; `snapshot_server` saves the other contents."""
    return [
        *(ShardId("shard", name) for name in store.shards),
        *(ShardId("table", name) for name in store.tables),
    ]


def snapshot_server(store: ShardStore) -> ShardSnapshot[SavedServer]:
    """Return counters and write keys."""
    record = SavedServer(counters=dict(store.counters), keys=store.write_keys.state())
    return ShardSnapshot(record, {})


def snapshot_shard(store: ShardStore, shard_id: ShardId) -> ShardSnapshot[Any]:
    """Return the current contents of a shard or table.

    Raises:
        NotFoundError: If it does not exist.
    """
    shard = _find(store, shard_id)
    if isinstance(shard, ArrayShard):
        return ShardSnapshot(_shard_record(shard), {"value": shard.value, **shard.slots})
    rows = shard.rows.index.rows()
    return ShardSnapshot(
        _table_record(shard), {**_table_columns(shard, rows), **_waiting_columns(shard)}
    )


def measure_rows(store: ShardStore, shard_id: ShardId) -> tuple[int, int]:
    """Return the number of rows of a shard or table, and the bytes of one row with its slots.

    For a table, rows without an id are counted as well.
    """
    shard = _find(store, shard_id)
    if isinstance(shard, ArrayShard):
        arrays = [shard.value, *shard.slots.values()]
        rows = len(shard.value) if shard.value.ndim else 1
        return rows, sum(array.nbytes for array in arrays) // max(1, rows) or 1
    return shard.rows.index.used, 8 + sum(
        column.nbytes // max(1, len(column)) for column in shard.rows.columns.values()
    )


def measure_dirty_bytes(
    store: ShardStore, shard_id: ShardId, since: int | None
) -> tuple[int, bool]:
    """Return the bytes written since a mark (None: ever), and whether that is everything."""
    rows, row_bytes = measure_rows(store, shard_id)
    dirty_rows = None if since is None else _find(store, shard_id).dirty_rows.rows_since(since)
    return (rows if dirty_rows is None else len(dirty_rows)) * row_bytes, dirty_rows is None


def snapshot_rows(
    store: ShardStore, shard_id: ShardId, start: int, stop: int
) -> ShardSnapshot[Any]:
    """Return the current contents of some rows of a shard or table.

    For a table, ids waiting for admission are not included.
    """
    shard = _find(store, shard_id)
    if isinstance(shard, ArrayShard):
        arrays = {"value": shard.value, **shard.slots}
        return ShardSnapshot(
            _shard_record(shard), {name: array[start:stop] for name, array in arrays.items()}
        )
    rows = shard.rows.index.rows()
    first, last = np.searchsorted(rows, (start, stop))
    return ShardSnapshot(_table_record(shard), _table_columns(shard, rows[first:last]))


def set_mark(store: ShardStore) -> int:
    """Begin a new period of dirty-row tracking; return the number of the one that ended."""
    ended = store.period
    store.period += 1
    for shard in store.shards.values():
        shard.dirty_rows.begin_period(store.period)
    for table in store.tables.values():
        table.begin_period(store.period)
    return ended


def snapshot_changes(store: ShardStore, shard_id: ShardId, since: int) -> ShardChanges[Any]:
    """Return the changes of a shard or table after a mark.

    Args:
        store: The store.
        shard_id: The shard or table.
        since: Result of `set_mark`.
    """
    shard = _find(store, shard_id)
    rows = shard.dirty_rows.rows_since(since)
    if isinstance(shard, ArrayShard):
        arrays = {"value": shard.value, **shard.slots}
        if rows is None:
            return ShardChanges(_shard_record(shard), True, None, None, arrays)
        # A write to a scalar marks all of it as written, so here it was not written.
        written = {name: np.atleast_1d(array)[rows] for name, array in arrays.items()}
        return ShardChanges(_shard_record(shard), False, rows, None, written)
    record = _table_record(shard)
    live = shard.rows.index.rows()
    if rows is None:
        return ShardChanges(
            record, True, None, None, {**_table_columns(shard, live), **_waiting_columns(shard)}
        )
    # Freed rows are left out; their ids are among the removed ones.
    rows = rows[np.isin(rows, live, assume_unique=True)]
    return ShardChanges(
        record,
        False,
        None,
        shard.removed_since(since),
        {**_table_columns(shard, rows), **_waiting_columns(shard)},
    )


def forget_removed_ids(store: ShardStore, until: int) -> None:
    """Forget ids removed in periods up to a mark, which no later increment needs."""
    for table in store.tables.values():
        table.removed_ids = [(period, ids) for period, ids in table.removed_ids if period > until]


def restore_snapshot(store: ShardStore, saved: ShardSnapshot[Any]) -> None:
    """Restore saved contents, replacing those of the same name.

    Arrays are copied.

    Raises:
        InvalidArgumentError: If a value does not fit its spec.
    """
    record, arrays = saved
    if isinstance(record, SavedServer):
        store.counters = dict(record.counters)
        store.write_keys = WriteKeys(record.keys)
    elif isinstance(record, SavedShard):
        copies = {name: np.array(array, order="C", copy=True) for name, array in arrays.items()}
        put_shard(store, build_shard(ShardSnapshot(record, copies)))
    else:
        put_shard(store, build_shard(saved))


def build_shard(saved: ShardSnapshot[Any]) -> ArrayShard | TableShard:
    """Return the shard of a snapshot; a variable shard takes over the arrays.

    Raises:
        InvalidArgumentError: If a value does not fit its spec.
    """
    record, arrays = saved
    if isinstance(record, SavedTable):
        return _build_table(record, arrays)
    value = arrays["value"]
    check_value(record.spec, value)
    shard = ArrayShard(record.spec, value, 0)
    shard.slots = {name: array for name, array in arrays.items() if name != "value"}
    shard.slot_initial_values = dict(record.slot_initial_values)
    return shard


def put_shard(store: ShardStore, shard: ArrayShard | TableShard) -> None:
    """Add a shard or table to a store, replacing one of the same name."""
    shard.dirty_rows = DirtyRows(store.period)
    if isinstance(shard, ArrayShard):
        store.shards[shard.spec.name] = shard
    else:
        shard.begin_period(store.period)
        store.tables[shard.spec.name] = shard


def _build_table(record: SavedTable, arrays: Mapping[str, NDArray[Any]]) -> TableShard:
    table = TableShard(record.spec, 0)
    table.step = record.step
    for name, first in record.slot_initial_values.items():
        shape = arrays[name].shape[1:]
        table.rows.add_column(name, slot_column(shape, table.dtype, first))
    rows, _ = table.rows.find_or_add(np.ascontiguousarray(arrays["ids"]))
    for name in table.rows.columns:
        table.rows[name][rows] = arrays[name]
    waiting, _ = table.waiting_ids.find_or_add(np.ascontiguousarray(arrays["waiting_ids"]))
    for name in table.waiting_ids.columns:
        table.waiting_ids[name][waiting] = arrays[f"waiting_{name}"]
    return table


def _shard_record(shard: ArrayShard) -> SavedShard:
    return SavedShard(spec=shard.spec, slot_initial_values=dict(shard.slot_initial_values))


def _table_record(table: TableShard) -> SavedTable:
    initial_values = {name: table.rows.initial_value(name) for name in table.slots}
    return SavedTable(spec=table.spec, step=table.step, slot_initial_values=initial_values)


def _table_columns(table: TableShard, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    columns = {name: column[rows] for name, column in table.rows.columns.items()}
    return {"ids": table.rows.index.ids_of(rows), **columns}


def _waiting_columns(table: TableShard) -> dict[str, NDArray[Any]]:
    rows = table.waiting_ids.index.rows()
    columns = {
        f"waiting_{name}": column[rows] for name, column in table.waiting_ids.columns.items()
    }
    return {"waiting_ids": table.waiting_ids.index.ids_of(rows), **columns}


def _find(store: ShardStore, shard_id: ShardId) -> ArrayShard | TableShard:
    kind, name = shard_id
    found = store.shards.get(name) if kind == "shard" else store.tables.get(name)
    if found is None:
        raise NotFoundError(f"there is no {kind} {name} on this server")
    return found
