"""Snapshots of a store: complete, and changes since a mark."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.errors import NotFoundError
from headrace.parameter_server.operations import (
    Apply,
    ApplyIds,
    Assign,
    Create,
    CreateTable,
    Evict,
    LookupIds,
)
from headrace.parameter_server.shard_values import (
    SavedServer,
    SavedShard,
    SavedTable,
)
from headrace.parameter_server.specs import (
    AdamRule,
    RowWiseAdagradRule,
    SgdRule,
    ShardSpec,
    StepParameters,
    TableSpec,
    Uniform,
)
from headrace.parameter_server.store import (
    ShardId,
    ShardStore,
    list_shards,
    restore_snapshot,
    set_mark,
    snapshot_changes,
    snapshot_shard,
)

F = np.float32
SHAPE = (10, 3)
SHARD, TABLE = ShardId("shard", "v/0"), ShardId("table", "t/0")


SHARD_SPEC = ShardSpec(name="v/0", variable="v", shape=SHAPE, dtype="float32", variable_shape=SHAPE)
TABLE_SPEC = TableSpec(name="t/0", table="t", dim=3, admission=2, initializer=Uniform(0.0, 1.0, 3))


@pytest.fixture
def store():
    made = ShardStore()
    made.execute(Create(shard=SHARD_SPEC, initializer=Uniform()))
    made.execute(CreateTable(table=TABLE_SPEC))
    return made


def train(store, steps):
    """Take some steps on rows of the variable and ids of the table."""
    for iteration in steps:
        rng = np.random.default_rng(iteration)
        rows, ids = np.unique(rng.integers(0, 10, 4)), np.unique(rng.integers(0, 40, 12))
        step = StepParameters(iteration=iteration, learning_rate=0.1)
        store.execute(LookupIds(table="t/0"), [ids])
        for name, rule in (("adam", AdamRule()), ("rows", RowWiseAdagradRule())):
            operation = Apply(shard="v/0", optimizer=name, rule=rule, step=step)
            store.execute(operation, [rows, rng.standard_normal((len(rows), 3)).astype(F)])
            operation = ApplyIds(table="t/0", optimizer=name, rule=rule, step=step)
            store.execute(operation, [ids, rng.standard_normal((len(ids), 3)).astype(F)])


def contents(store):
    """Return the contents of a store; those of a table sorted by id."""
    found = []
    for shard in list_shards(store):
        arrays = snapshot_shard(store, shard).arrays
        order = {name: np.argsort(arrays[name]) for name in arrays if name.endswith("ids")}
        for name, array in arrays.items():
            ids = "waiting_ids" if name.startswith("waiting") else "ids"
            found.append((name, array[order.get(ids, ...)].tolist()))
    return found


def test_a_restored_store_is_complete_and_shares_no_memory(store):
    train(store, range(2))
    again = ShardStore()
    for shard in list_shards(store):
        restore_snapshot(again, snapshot_shard(store, shard))
    before = contents(again)
    assert before == contents(store)
    train(store, range(2, 4))
    assert contents(again) == before


def test_records_round_trip_through_json(store):
    union = SavedShard | SavedTable | SavedServer
    for shard in list_shards(store):
        record = snapshot_shard(store, shard).record
        assert msgspec.json.decode(msgspec.json.encode(record), type=union) == record


def test_an_increment_has_exactly_the_written_rows(store):
    train(store, range(3))
    since = set_mark(store)
    changes = snapshot_changes(store, SHARD, since)
    assert (changes.is_complete, changes.rows.tolist()) == (False, [])
    step = StepParameters(iteration=3, learning_rate=0.1)
    operation = Apply(shard="v/0", optimizer="o", rule=SgdRule(), step=step)
    store.execute(operation, [np.array([2, 8]), np.ones((2, 3), F)])
    changes = snapshot_changes(store, SHARD, since)
    assert changes.rows.tolist() == [2, 8]
    assert {array.shape[0] for array in changes.arrays.values()} == {2}
    store.execute(Assign(shard="v/0"), [np.zeros(SHAPE, F)])
    assert snapshot_changes(store, SHARD, since).is_complete
    later = set_mark(store)
    assert snapshot_changes(store, SHARD, later).rows.tolist() == []
    assert snapshot_changes(store, SHARD, since).is_complete


def test_an_increment_omits_an_unwritten_scalar():
    store = ShardStore()
    spec = ShardSpec(
        name="v/0", variable="v", index=0, row=0, shape=(), dtype="float32", variable_shape=()
    )
    store.execute(Create(shard=spec), [np.array(1.0, F)])
    since = set_mark(store)
    unwritten = snapshot_changes(store, SHARD, since)
    assert (unwritten.is_complete, unwritten.rows.tolist()) == (False, [])
    store.execute(Assign(shard="v/0", mode="add"), [np.array(1.0, F)])
    written = snapshot_changes(store, SHARD, since)
    assert (written.is_complete, written.arrays["value"].tolist()) == (True, 2.0)


def test_an_increment_of_a_table_has_new_rows_and_removed_ids(store):
    store.execute(LookupIds(table="t/0"), [np.arange(6), np.full(6, 2)])
    since = set_mark(store)
    step = StepParameters(iteration=9, learning_rate=0.1)
    operation = ApplyIds(table="t/0", optimizer="o", rule=SgdRule(), step=step)
    store.execute(operation, [np.arange(4), np.ones((4, 3), F)])
    store.execute(Evict(table="t/0", older_than=5))
    store.execute(LookupIds(table="t/0"), [np.array([4, 50]), np.full(2, 2)])
    changes = snapshot_changes(store, TABLE, since)
    assert sorted(changes.arrays["ids"].tolist()) == [0, 1, 2, 3, 4, 50]
    assert changes.removed_ids.tolist() == [5]


def test_writes_are_not_tracked_before_the_first_mark(store):
    train(store, range(3))
    assert store.shards["v/0"].dirty_rows.nbytes == 0
    assert store.tables["t/0"].dirty_rows.nbytes == 0
    assert snapshot_changes(store, SHARD, set_mark(store) - 1).is_complete


def test_saving_a_missing_shard_fails():
    with pytest.raises(NotFoundError, match="there is no shard v/0 on this server"):
        snapshot_shard(ShardStore(), SHARD)
