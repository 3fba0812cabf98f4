"""The store of one parameter server: carries out operations, and takes and restores snapshots.

    answer, arrays = store.carry_out(operation, arrays)

Rule 1: an operation is carried out whole, or an error is raised and nothing has changed.
Rule 2: arrays that come in belong to the caller again once `carry_out` has returned.
Rule 3: arrays that go out are new, but for `Read`: they are the shard's own memory, read-only, and
        hold until the next operation. Who needs them longer copies them.
Rule 4: a key is carried out once (`write_keys`).

A snapshot is taken between two operations, so each shard in it is consistent. Its arrays are the
store's own, too: copy them before they are written, or used after the next operation.

    for holding in holdings(store):
        saved = snapshot_of(store, holding)
    restore(store, saved)

    period = mark(store)
    changes = changes_of(store, holding, period)    # rows written since the mark

No thread, socket or clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from headrace.parameter_server import operations as ops
from headrace.parameter_server.array_shard import ArrayShard, check_place, check_value
from headrace.parameter_server.saved import (
    Changes,
    Saved,
    SavedServer,
    SavedShard,
    SavedTable,
    Touched,
)
from headrace.parameter_server.specs import dtype_named
from headrace.parameter_server.table_rows import fill
from headrace.parameter_server.table_shard import TableShard, slot_column
from headrace.parameter_server.write_keys import WriteKeys
from headrace.serving.call import Done

__all__ = [
    "Holding",
    "Store",
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


Arrays = Sequence[NDArray[Any]]
Carried = tuple[ops.Answer, Arrays]

_DONE = Done()


class Store:
    """Shards, tables and counters of one server.

    Args:
        allocate: Makes the arrays that answer `Gather`, `Lookup` and `GatherIds`, from a shape and
            a dtype; it may return memory from which they are sent.

    Attributes:
        shards: Of variables, by name.
        tables: Shards of tables, by name.
        counters: By name.
        keys: Writes that were carried out.
        period: How many marks were set (`marks`).
        is_restored: Whether it was filled from a checkpoint: what is not there was not saved.
    """

    def __init__(self, allocate: Callable[..., NDArray[Any]] = np.empty) -> None:
        self.shards: dict[str, ArrayShard] = {}
        self.tables: dict[str, TableShard] = {}
        self.counters: dict[str, int] = {}
        self.keys = WriteKeys()
        self.period = 0
        self.is_restored = False
        self._allocate = allocate

    def carry_out(self, operation: ops.Operation, arrays: Arrays = ()) -> Carried:
        """Carry out one operation, and return its answer and the arrays that go with it.

        Raises:
            InvalidArgumentError: Arrays do not fit the operation, or what it names.
            NotFoundError: It names no shard or table of this server.
            AlreadyExistsError: It makes something under a name that is taken.
            AbortedError: Its key is refused.
        """
        kind = type(operation)
        carry_out, fewest, most = _OPERATIONS[kind]
        if not fewest <= len(arrays) <= most:
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            raise InvalidArgumentError(
                f"{kind.__name__} needs {wanted} arrays, but got {len(arrays)}"
            )
        key = getattr(operation, "key", None)
        if key is None:
            return carry_out(self, operation, arrays)
        target = _target(operation)
        answer = self.keys.known(key, target)
        if answer is not None:
            return self._repeat(operation, arrays, answer)
        answered, out = carry_out(self, operation, arrays)
        assert isinstance(answered, Done | ops.Counted)
        self.keys.remember(key, target, answered)
        return answered, out

    def _repeat(
        self, operation: ops.Operation, arrays: Arrays, answer: Done | ops.Counted
    ) -> Carried:
        if isinstance(operation, ops.Lookup):
            return self._lookup(operation, arrays, count=False)
        return answer, ()

    # --- variables -------------------------------------------------------------------------------

    def _create(self, operation: ops.Create, arrays: Arrays) -> Carried:
        spec = operation.shard
        found = self.shards.get(spec.name)
        if found is not None:
            if found.spec != spec:
                raise AlreadyExistsError(
                    f"there is a shard {spec.name} of dtype {found.spec.dtype} and shape "
                    f"{found.spec.shape}, from row {found.spec.row} of {found.spec.variable} with "
                    f"shape {found.spec.variable_shape}; it cannot be made of dtype {spec.dtype} "
                    f"and shape {spec.shape}, from row {spec.row} of {spec.variable} with shape "
                    f"{spec.variable_shape}: use another name"
                )
            return ops.Created(existed=True), ()
        check_place(spec)
        if (operation.initializer is None) != (len(arrays) == 1):
            raise InvalidArgumentError(
                f"shard {spec.name} is made from a value or from an initializer, but got "
                + ("both" if arrays else "neither")
            )
        if operation.initializer is None:
            check_value(spec, arrays[0])
            value = np.array(arrays[0], order="C", copy=True)
        else:
            value = np.empty(spec.shape, dtype_named(spec.dtype))
            fill(value, operation.initializer, spec.row)
        self.shards[spec.name] = ArrayShard(spec, value, self.period)
        return ops.Created(existed=False), ()

    def _read(self, operation: ops.Read, arrays: Arrays) -> Carried:
        shard = self._shard(operation.shard)
        value = (shard.read_slot(operation.slot) if operation.slot else shard.value).view()
        value.flags.writeable = False
        return _DONE, (value,)

    def _assign(self, operation: ops.Assign, arrays: Arrays) -> Carried:
        shard = self._shard(operation.shard)
        if operation.slot:
            shard.assign_slot(operation.slot, operation.first, arrays[0])
        else:
            shard.assign(operation.how, arrays[0])
        return _DONE, ()

    def _gather(self, operation: ops.Gather, arrays: Arrays) -> Carried:
        return _DONE, (self._shard(operation.shard).gather(arrays[0], self._allocate),)

    def _scatter(self, operation: ops.Scatter, arrays: Arrays) -> Carried:
        self._shard(operation.shard).scatter(operation.how, arrays[0], arrays[1])
        return _DONE, ()

    def _apply(self, operation: ops.Apply, arrays: Arrays) -> Carried:
        shard = self._shard(operation.shard)
        shard.apply(operation.optimizer, operation.rule, operation.step, list(arrays))
        return _DONE, ()

    def _count(self, operation: ops.Count, arrays: Arrays) -> Carried:
        if operation.by < 0:
            raise InvalidArgumentError(
                f"the counter {operation.counter} only grows, but got {operation.by}"
            )
        before = self.counters.get(operation.counter, 0)
        if before < operation.seen and not self.is_restored:
            raise NotFoundError(
                f"the counter {operation.counter} is at {before} on this server, and was at "
                f"{operation.seen}"
            )
        self.counters[operation.counter] = after = before + operation.by
        return ops.Counted(before=before, after=after), ()

    # --- tables ----------------------------------------------------------------------------------

    def _create_table(self, operation: ops.CreateTable, arrays: Arrays) -> Carried:
        spec = operation.table
        found = self.tables.get(spec.name)
        if found is None:
            self.tables[spec.name] = TableShard(spec, self.period)
        elif found.spec != spec:
            others = [
                f"{field}={there!r}, and not {getattr(spec, field)!r}"
                for field in spec.__struct_fields__
                if (there := getattr(found.spec, field)) != getattr(spec, field)
            ]
            raise AlreadyExistsError(
                f"there is a table {spec.table} that is made otherwise: with {'; '.join(others)}. "
                "Use another name, or make it like that"
            )
        return ops.Created(existed=found is not None), ()

    def _lookup(self, operation: ops.Lookup, arrays: Arrays, *, count: bool = True) -> Carried:
        counts = arrays[1] if len(arrays) > 1 else None
        table = self._table(operation.table)
        rows = table.lookup(arrays[0], counts, count, self._allocate)
        return _DONE, (self._sent(rows, operation.dtype),)

    def _gather_ids(self, operation: ops.GatherIds, arrays: Arrays) -> Carried:
        table = self._table(operation.table)
        rows = table.gather(arrays[0], self._allocate, initialize=operation.initialize)
        return _DONE, (self._sent(rows, operation.dtype),)

    def _sent(self, rows: NDArray[Any], dtype: str) -> NDArray[Any]:
        return rows.astype(dtype_named(dtype), copy=False) if dtype else rows

    def _apply_ids(self, operation: ops.ApplyIds, arrays: Arrays) -> Carried:
        table = self._table(operation.table)
        table.apply(operation.optimizer, operation.rule, operation.step, *arrays)
        return _DONE, ()

    def _assign_ids(self, operation: ops.AssignIds, arrays: Arrays) -> Carried:
        self._table(operation.table).assign(arrays[0], arrays[1])
        return _DONE, ()

    def _evict(self, operation: ops.Evict, arrays: Arrays) -> Carried:
        return ops.Evicted(rows=self._table(operation.table).evict(operation.older_than)), ()

    def _export(self, operation: ops.Export, arrays: Arrays) -> Carried:
        if operation.limit < 1:
            raise InvalidArgumentError(
                f"a part of the table {operation.table} has at least 1 row, but got "
                f"limit={operation.limit}"
            )
        table = self._table(operation.table)
        ids, values, following = table.export(operation.start, operation.limit)
        return ops.Exported(next=following, rows=len(table.rows)), (ids, values)

    # --- closures, and all of it -----------------------------------------------------------------

    def _settle(self, operation: ops.Settle, arrays: Arrays) -> Carried:
        self.keys.settle(operation.incarnation, operation.closures, operation.below)
        return _DONE, ()

    def _fence(self, operation: ops.Fence, arrays: Arrays) -> Carried:
        self.keys.fence(operation.incarnation, operation.worker)
        return _DONE, ()

    def _describe(self, operation: ops.Describe, arrays: Arrays) -> Carried:
        shards = tuple(
            ops.ShardDescription(spec=shard.spec, bytes=shard.nbytes, slots=tuple(shard.slots))
            for shard in self.shards.values()
            if operation.variable in (None, shard.spec.variable)
        )
        tables = tuple(
            ops.TableDescription(
                spec=table.spec,
                rows=len(table.rows),
                waiting=len(table.waiting),
                bytes=table.nbytes,
                slots=tuple(table.slots),
            )
            for table in self.tables.values()
        )
        described = ops.Described(
            incarnation=self.keys.incarnation,
            shards=shards,
            tables=tables,
            counters=dict(self.counters),
            keys=len(self.keys),
            bytes=sum(part.bytes for part in shards) + sum(part.bytes for part in tables),
        )
        return described, ()

    def _shard(self, name: str) -> ArrayShard:
        found = self.shards.get(name)
        if found is None:
            raise NotFoundError(
                f"there is no shard {name} on this server; it has {_listed(self.shards)}"
            )
        return found

    def _table(self, name: str) -> TableShard:
        found = self.tables.get(name)
        if found is None:
            raise NotFoundError(
                f"there is no table {name} on this server; it has {_listed(self.tables)}"
            )
        return found


#: How each operation is carried out, and how many arrays come with it, at least and at most.
_OPERATIONS: dict[type[Any], tuple[Callable[[Store, Any, Arrays], Carried], int, int]] = {
    ops.Create: (Store._create, 0, 1),
    ops.Read: (Store._read, 0, 0),
    ops.Assign: (Store._assign, 1, 1),
    ops.Gather: (Store._gather, 1, 1),
    ops.Scatter: (Store._scatter, 2, 2),
    ops.Apply: (Store._apply, 1, 3),
    ops.Count: (Store._count, 0, 0),
    ops.CreateTable: (Store._create_table, 0, 0),
    ops.Lookup: (Store._lookup, 1, 2),
    ops.GatherIds: (Store._gather_ids, 1, 1),
    ops.ApplyIds: (Store._apply_ids, 2, 3),
    ops.AssignIds: (Store._assign_ids, 2, 2),
    ops.Evict: (Store._evict, 0, 0),
    ops.Export: (Store._export, 0, 0),
    ops.Settle: (Store._settle, 0, 0),
    ops.Fence: (Store._fence, 0, 0),
    ops.Describe: (Store._describe, 0, 0),
}


def _target(operation: Any) -> str:
    """Return what a write changes: a shard, a table and a counter may have one name."""
    for kind in ("shard", "table", "counter"):
        name = getattr(operation, kind, None)
        if name is not None:
            return f"{kind} {name}"
    raise TypeError(f"{type(operation).__name__} changes nothing that has a name")


def _listed(names: Any) -> str:
    known = sorted(names)
    text = ", ".join(known[:8]) or "none"
    return text if len(known) <= 8 else f"{text} and {len(known) - 8} more"


# --- snapshots ------------------------------------------------------------------------------------


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
    part.touched = Touched(store.period)
    if isinstance(part, ArrayShard):
        store.shards[part.spec.name] = part
    else:
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
