"""What is saved of a store: whole, in other numbers of shards, and what changed since a mark."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.errors import InvalidArgumentError, NotFoundError
from headrace.parameter_server.gradients import shard_of_ids
from headrace.parameter_server.operations import (
    Apply,
    ApplyIds,
    Assign,
    Create,
    CreateTable,
    Evict,
    Export,
    Lookup,
    Read,
    Scatter,
)
from headrace.parameter_server.partitioners import ranges_of_rows
from headrace.parameter_server.saved import (
    Saved,
    SavedServer,
    SavedShard,
    SavedTable,
    apply_changes,
    cut_shards,
    deal_tables,
    join_shards,
    join_tables,
)
from headrace.parameter_server.specs import (
    AdamRule,
    RowWiseAdagradRule,
    SgdRule,
    ShardSpec,
    Step,
    TableSpec,
    Uniform,
)
from headrace.parameter_server.store import (
    Holding,
    Store,
    changes_of,
    forget_removed,
    holdings,
    mark,
    restore,
    snapshot_of,
)

F = np.float32
SHAPE = (10, 3)
SHARD, TABLE = Holding("shard", "v/0"), Holding("table", "t/0")


def shard_specs(shards, shape=SHAPE):
    return [
        ShardSpec(
            name=f"v/{index}", variable="v", index=index, row=part.start,
            shape=(len(part), *shape[1:]), dtype="float32", variable_shape=shape,
        )
        for index, part in enumerate(ranges_of_rows(shape[0], shards))
    ]  # fmt: skip


def table_specs(shards, **other):
    return [
        TableSpec(
            name=f"t/{index}", table="t", index=index, shards=shards, dim=3, admission=2,
            initializer=Uniform(0.0, 1.0, 3), **other,
        )
        for index in range(shards)
    ]  # fmt: skip


def stores(shards):
    found = []
    for shard, table in zip(shard_specs(shards), table_specs(shards), strict=True):
        store = Store()
        store.carry_out(Create(shard=shard, initializer=Uniform()))
        store.carry_out(CreateTable(table=table))
        found.append(store)
    return found


def train(found, steps, seed=0):
    """Some steps on all shards: rows of the variable, and ids of the table."""
    for iteration in steps:
        rng = np.random.default_rng([seed, iteration])
        rows = np.unique(rng.integers(0, 10, 4))
        ids = np.unique(rng.integers(0, 40, 12))
        gradient = {one: rng.standard_normal(3).astype(F) for one in (*rows, *(ids + 1000))}
        step = Step(iteration=iteration, learning_rate=0.1)
        owner = shard_of_ids(ids, len(found))
        for index, store in enumerate(found):
            spec = store.shards[f"v/{index}"].spec
            here = rows[(rows >= spec.row) & (rows < spec.row + spec.shape[0])]
            mine = ids[owner == index]
            for name, rule in (("adam", AdamRule()), ("rows", RowWiseAdagradRule())):
                if len(here):
                    operation = Apply(shard=spec.name, optimizer=name, rule=rule, step=step)
                    store.carry_out(operation, [here, np.stack([gradient[one] for one in here])])
                if len(mine):
                    store.carry_out(Lookup(table=f"t/{index}"), [mine])
                    operation = ApplyIds(table=f"t/{index}", optimizer=name, rule=rule, step=step)
                    values = np.stack([gradient[one + 1000] for one in mine])
                    store.carry_out(operation, [mine, values])


def saved_shards(found):
    return [snapshot_of(store, Holding("shard", f"v/{k}")) for k, store in enumerate(found)]


def saved_tables(found):
    return [snapshot_of(store, Holding("table", f"t/{k}")) for k, store in enumerate(found)]


def contents(found):
    """All that stores hold, whatever the number of shards."""
    whole = join_shards(saved_shards(found)).arrays
    table = join_tables(saved_tables(found)).arrays
    ids, waiting = table["ids"].tolist(), table["waiting_ids"].tolist()
    return (
        {name: array.tolist() for name, array in sorted(whole.items())},
        {
            name: dict(zip(waiting if "waiting" in name else ids, array.tolist(), strict=True))
            for name, array in sorted(table.items())
        },
    )


def copied(saved):
    """As it comes back from a file."""
    kind = type(saved.record)
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(saved.record), type=kind)
    return Saved(record, {name: array.copy() for name, array in saved.arrays.items()})


def restored(shards, whole, table):
    found = [Store() for _ in range(shards)]
    for store, part in zip(found, cut_shards(whole, shard_specs(shards)), strict=True):
        restore(store, copied(part))
    for store, part in zip(found, deal_tables(table, table_specs(shards)), strict=True):
        restore(store, copied(part))
    return found


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_training_goes_on_in_any_number_of_shards_as_if_never_interrupted(before, after):
    found = stores(before)
    train(found, range(6))
    whole, table = join_shards(saved_shards(found)), join_tables(saved_tables(found))
    again = restored(after, whole, table)
    assert contents(again) == contents(found)
    train(found, range(6, 12))
    train(again, range(6, 12))
    assert contents(again) == contents(found)


def test_a_slot_that_only_some_shards_have_is_kept_and_others_get_first_values():
    found = stores(2)
    step = Step(iteration=0, learning_rate=0.1)
    rule = RowWiseAdagradRule(initial_accumulator_value=0.5)
    operation = Apply(shard="v/1", optimizer="o", rule=rule, step=step)
    found[1].carry_out(operation, [np.array([7]), np.ones((1, 3), F)])
    whole = join_shards(saved_shards(found))
    assert whole.arrays["o/accumulator"].tolist() == [0.5] * 7 + [1.5] + [0.5] * 2


def test_a_server_comes_back_with_counters_and_keys():
    store = Store()
    restore(store, Saved(SavedServer(counters={"steps": 4}), {}))
    assert store.counters == {"steps": 4}


def test_a_restored_store_shares_no_memory_with_what_was_saved():
    found = stores(1)
    train(found, range(2))
    again = Store()
    for holding in holdings(found[0]):
        restore(again, snapshot_of(found[0], holding))
    before = contents([again])
    train(found, range(2, 4))
    assert contents([again]) == before


def test_shards_that_do_not_make_up_a_variable_are_refused():
    found = stores(3)
    parts = saved_shards(found)
    with pytest.raises(InvalidArgumentError, match="only 7 were saved; a shard is missing"):
        join_shards(parts[:2])
    with pytest.raises(InvalidArgumentError, match="after row 3 comes v/2 with row 7"):
        join_shards([parts[0], parts[2]])
    wider = msgspec.structs.replace(table_specs(1)[0], dim=4)
    with pytest.raises(InvalidArgumentError, match=r"has shape \(12, 3\) and dtype float32, but"):
        cut_shards(join_shards(parts), shard_specs(2, (12, 3)))
    with pytest.raises(InvalidArgumentError, match="t has 4 elements of float32 in a row, but"):
        deal_tables(join_tables(saved_tables(found)), [wider])


@pytest.mark.parametrize("shape", [(), (0,), (0, 2), (3, 0)])
def test_odd_shapes_are_saved_and_restored(shape):
    spec = ShardSpec(name="v", variable="v", shape=shape, dtype="float32", variable_shape=shape)
    store, again = Store(), Store()
    store.carry_out(Create(shard=spec), [np.ones(shape, F)])
    step = Step(iteration=0, learning_rate=0.5)
    store.carry_out(
        Apply(shard="v", optimizer="o", rule=AdamRule(), step=step), [np.ones(shape, F)]
    )
    whole = join_shards([snapshot_of(store, Holding("shard", "v"))])
    (part,) = cut_shards(whole, [spec])
    restore(again, copied(part))
    for key in ("value", "o/momentum"):
        found = snapshot_of(again, Holding("shard", "v")).arrays[key]
        assert found.tobytes() == whole.arrays[key].tobytes()


def test_a_record_says_what_it_is_when_it_is_decoded():
    store = stores(1)[0]
    union = SavedShard | SavedTable | SavedServer
    for holding in holdings(store):
        record = snapshot_of(store, holding).record
        assert msgspec.json.decode(msgspec.json.encode(record), type=union) == record


@pytest.mark.parametrize("seed", range(8))
def test_what_was_saved_and_its_increments_make_up_what_is_there(seed):
    rng = np.random.default_rng(seed)
    (store,) = stores(1)
    train([store], range(2), seed)
    since = mark(store)
    saved = {holding: copied(snapshot_of(store, holding)) for holding in holdings(store)}
    iteration = 2
    for _ in range(4):
        for _ in range(int(rng.integers(0, 4))):
            match int(rng.integers(4)):
                case 0 | 1:
                    train([store], [iteration], seed)
                case 2:
                    store.carry_out(Evict(table="t/0", older_than=int(rng.integers(1, 4))))
                case 3:
                    arrays = [np.array([3]), np.zeros((1, 3), F)]
                    store.carry_out(Scatter(shard="v/0", how="update"), arrays)
            iteration += 1
        following = mark(store)
        for holding in saved:
            changes = changes_of(store, holding, since)
            saved[holding] = copied(apply_changes(saved[holding], changes))
        since = following
        forget_removed(store, since)
    again = Store()
    for part in saved.values():
        restore(again, part)
    assert contents([again]) == contents([store]), seed


def test_an_increment_has_the_rows_that_were_touched_and_no_others():
    (store,) = stores(1)
    train([store], range(3))
    since = mark(store)
    changes = changes_of(store, SHARD, since)
    assert (changes.whole, changes.rows.tolist()) == (False, [])
    step = Step(iteration=3, learning_rate=0.1)
    operation = Apply(shard="v/0", optimizer="o", rule=SgdRule(), step=step)
    store.carry_out(operation, [np.array([2, 8]), np.ones((2, 3), F)])
    changes = changes_of(store, SHARD, since)
    assert changes.rows.tolist() == [2, 8]
    assert {array.shape[0] for array in changes.arrays.values()} == {2}
    store.carry_out(Assign(shard="v/0"), [np.zeros(SHAPE, F)])
    assert changes_of(store, SHARD, since).whole
    later = mark(store)
    assert changes_of(store, SHARD, later).rows.tolist() == []
    assert changes_of(store, SHARD, since).whole


def test_an_increment_has_nothing_of_a_single_number_that_was_not_written():
    store = Store()
    spec = ShardSpec(
        name="v/0", variable="v", index=0, row=0, shape=(), dtype="float32", variable_shape=()
    )
    store.carry_out(Create(shard=spec), [np.array(1.0, F)])
    since = mark(store)
    unwritten = changes_of(store, SHARD, since)
    assert (unwritten.whole, unwritten.rows.tolist()) == (False, [])
    store.carry_out(Assign(shard="v/0", how="add"), [np.array(1.0, F)])
    written = changes_of(store, SHARD, since)
    assert (written.whole, written.arrays["value"].tolist()) == (True, 2.0)


def test_an_increment_of_a_table_has_its_new_rows_and_the_ids_that_went():
    (store,) = stores(1)
    store.carry_out(Lookup(table="t/0"), [np.arange(6), np.full(6, 2)])
    since = mark(store)
    step = Step(iteration=9, learning_rate=0.1)
    operation = ApplyIds(table="t/0", optimizer="o", rule=SgdRule(), step=step)
    store.carry_out(operation, [np.arange(4), np.ones((4, 3), F)])
    store.carry_out(Evict(table="t/0", older_than=5))
    store.carry_out(Lookup(table="t/0"), [np.array([4, 50]), np.full(2, 2)])
    changes = changes_of(store, TABLE, since)
    assert sorted(changes.arrays["ids"].tolist()) == [0, 1, 2, 3, 4, 50]
    assert changes.removed.tolist() == [5]


def test_without_a_mark_nothing_is_kept_of_what_was_touched():
    (store,) = stores(1)
    train([store], range(3))
    assert store.shards["v/0"].touched.nbytes == 0
    assert store.tables["t/0"].touched.nbytes == 0
    assert changes_of(store, SHARD, mark(store) - 1).whole


def test_what_is_not_there_cannot_be_saved():
    with pytest.raises(NotFoundError, match="there is no shard v/0 on this server"):
        snapshot_of(Store(), SHARD)


def test_a_restored_shard_is_read_and_exported():
    found = stores(1)
    train(found, range(3))
    again = restored(1, join_shards(saved_shards(found)), join_tables(saved_tables(found)))
    value = again[0].carry_out(Read(shard="v/0"))[1][0]
    assert value.tobytes() == found[0].carry_out(Read(shard="v/0"))[1][0].tobytes()
    ids, _ = again[0].carry_out(Export(table="t/0"))[1]
    assert sorted(ids.tolist()) == sorted(found[0].carry_out(Export(table="t/0"))[1][0].tolist())
