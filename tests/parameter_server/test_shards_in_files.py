"""Shards in files: saved during writes, in increments, and restored in other partitionings."""

from __future__ import annotations

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from headrace.errors import DataLossError, NotFoundError
from headrace.parameter_server.checkpoint_format import TensorFile, current_pieces, write_tensors
from headrace.parameter_server.gradients import assign_shards
from headrace.parameter_server.operations import (
    Apply,
    ApplyIds,
    Assign,
    Create,
    CreateTable,
    Evict,
    LookupIds,
    ReadShard,
    Scatter,
)
from headrace.parameter_server.partitioners import split_rows
from headrace.parameter_server.shard_files import put_shards, read_shards, write_shards
from headrace.parameter_server.specs import (
    AdamRule,
    Normal,
    RowWiseAdagradRule,
    SgdRule,
    ShardSpec,
    StepParameters,
    TableSpec,
    WriteKey,
)
from headrace.parameter_server.store import ShardId, ShardStore, list_shards
from headrace.storage.files import open_folder

F = np.float32
ADAM = AdamRule()


def shard_specs(rows, shards, columns=3, dtype="float32"):
    return [
        ShardSpec(
            name=f"v/{index}",
            variable="v",
            index=index,
            row=part.start,
            shape=(len(part), columns),
            dtype=dtype,
            variable_shape=(rows, columns),
        )
        for index, part in enumerate(split_rows(rows, shards))
    ]


def a_store(specs, value=0.0):
    """Return a store with shards filled with a number."""
    store = ShardStore()
    for spec in specs:
        store.execute(Create(spec), [np.full(spec.shape, value, F)])
    return store


def table_specs(shards, **options):
    return [
        TableSpec(name=f"t/{index}", table="t", index=index, shards=shards, dim=2, **options)
        for index in range(shards)
    ]


def call_directly(function):
    return function()


def saved(store, folder, since=None, stem="c.0", between=call_directly, part_bytes=1 << 20):
    return write_shards(
        store, between, folder, stem, list_shards(store), since, chunk_bytes=part_bytes
    )


def restored(folder, pieces, shards=(), tables=(), renamed=None):
    store = ShardStore()
    parts = read_shards(
        folder,
        [(spec, "v") for spec in shards],
        [(spec, "t") for spec in tables],
        pieces,
        renamed or {},
    )
    put_shards(store, call_directly, parts, {}, 0, {})
    return store


def adam(store, name, rows, step):
    rows = np.asarray(rows, np.int64)
    values = np.full((len(rows), 3), step + 1, F)
    store.execute(
        Apply(name, "adam", ADAM, StepParameters(iteration=step, learning_rate=0.1)), [rows, values]
    )


def push_ids(store, name, ids, step):
    ids = np.asarray(ids, np.int64)
    store.execute(LookupIds(name), [ids])
    store.execute(
        ApplyIds(name, "adam", ADAM, StepParameters(iteration=step, learning_rate=0.1)),
        [ids, np.full((len(ids), 2), step + 1, F)],
    )


def contents(tables):
    """Return all rows of a table, by id."""
    found = {}
    for table in tables:
        rows = table.rows.index.rows()
        for id_, row in zip(table.rows.index.ids_of(rows).tolist(), rows, strict=True):
            found[id_] = {name: column[row].tolist() for name, column in table.rows.columns.items()}
    return found


@pytest.fixture
def folder(tmp_path):
    return open_folder(str(tmp_path))


def test_tensor_files_are_readable_by_safetensors(folder, tmp_path):
    arrays = {
        "a/value": np.arange(6, dtype=F).reshape(2, 3),
        "empty": np.empty((0, 4), np.int64),
        "number": np.array(7, np.uint16),
        "flags": np.array([True, False]),
        "half": np.array([1.5, -2], ml_dtypes.bfloat16),
        "complex": np.array([1 + 2j], np.complex128),
    }
    write_tensors(folder, "x.safetensors", arrays)
    with safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert set(file.keys()) == set(arrays)
        assert file.get_tensor("a/value").tolist() == arrays["a/value"].tolist()
        assert file.get_tensor("number") == 7
    mine = TensorFile(folder, "x.safetensors")
    for name, array in arrays.items():
        assert mine[name].dtype == array.dtype
        assert mine[name].shape == array.shape
        assert np.array_equal(mine[name], array)
    assert set(mine.read_under("a")) == {"value"}


@pytest.mark.parametrize("length", [0, 7, 100, 200])
def test_a_truncated_file_is_damaged(folder, tmp_path, length):
    write_tensors(folder, "x", {"a": np.arange(100.0)})
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:length])
    with pytest.raises(DataLossError, match="damaged"):
        TensorFile(folder, "x")["a"]


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("part_bytes", [64, 1 << 20])
def test_shards_are_restored_in_any_number(folder, before, after, part_bytes):
    store = ShardStore()
    value = np.arange(33, dtype=F).reshape(11, 3)
    for spec in shard_specs(11, before):
        store.execute(Create(spec), [value[spec.row : spec.row + spec.shape[0]]])
    for spec in table_specs(before):
        store.execute(CreateTable(spec), [])
    ids = np.arange(40, dtype=np.int64) * 7919
    for step in range(3):
        adam(store, "v/0", range(step, 3), step)  # only one shard has slots
        for spec in table_specs(before):
            push_ids(store, spec.name, ids[assign_shards(ids, before) == spec.index], step)
    pieces = saved(store, folder, part_bytes=part_bytes).pieces
    back = restored(folder, pieces, shard_specs(11, after), table_specs(after))
    for name in ("value", "adam/momentum"):
        both = []
        for one in (store, back):
            parts = []
            for spec in shard_specs(11, before if one is store else after):
                shard = one.shards[spec.name]
                zeros = np.zeros(shard.value.shape, F)
                parts.append(shard.value if name == "value" else shard.slots.get(name, zeros))
            both.append(np.concatenate(parts))
        assert np.array_equal(*both), name
    assert contents(back.tables.values()) == contents(store.tables.values())
    assert {table.step for table in back.tables.values()} == {3}


@pytest.mark.parametrize("seed", range(6))
def test_a_shard_changed_during_a_save_is_consistent(folder, seed):
    rng = np.random.default_rng(seed)
    store = ShardStore()
    (spec,), (table,) = shard_specs(200, 1), table_specs(1, capacity=90)
    store.execute(Create(spec), [np.zeros((200, 3), F)])
    store.execute(CreateTable(table), [])
    push_ids(store, "t/0", rng.integers(0, 150, 60), 0)
    moments = {"v": [], "t": []}
    step = 1

    def call_and_write(function):
        nonlocal step
        found = function()
        moments["v"].append(store.shards["v/0"].value.copy())
        moments["t"].append(contents(store.tables.values()))
        adam(store, "v/0", np.unique(rng.integers(0, 200, 20)), step)
        push_ids(store, "t/0", np.unique(rng.integers(0, 150, 30)), step)
        if rng.random() < 0.1:
            store.execute(Assign("v/0"), [np.full((200, 3), step, F)])
        if rng.random() < 0.3:
            store.execute(Evict("t/0", 2), [])
        step += 1
        return found

    written = saved(store, folder, between=call_and_write, part_bytes=300)
    assert len([piece for piece in written.pieces if piece.kind == "shard"]) > 3
    back = restored(folder, written.pieces, [spec], [table])
    assert any(np.array_equal(back.shards["v/0"].value, value) for value in moments["v"])
    assert contents(back.tables.values()) in moments["t"]


@pytest.mark.parametrize("seed", range(6))
def test_full_save_and_increments_give_the_current_state(folder, seed):
    rng = np.random.default_rng(seed)
    store = a_store(shard_specs(60, 2))
    (table,) = table_specs(1, capacity=100, admission=2, initializer=Normal(seed=3))
    store.execute(CreateTable(table), [])
    pieces = []
    since = None
    step = 0
    for number in range(5):
        written = saved(store, folder, since, stem=f"c.{number}", part_bytes=256)
        pieces += written.pieces
        since = written.mark
        for _ in range(3):
            adam(store, "v/1", np.unique(rng.integers(30, 60, 5)), step)
            push_ids(store, "t/0", np.unique(rng.integers(0, 300, 50)), step)
            step += 1
        if rng.random() < 0.5:
            store.execute(Evict("t/0", 2), [])
        if rng.random() < 0.3:
            store.execute(Assign("v/0"), [rng.random((30, 3), F)])
    pieces += saved(store, folder, since, stem="c.last").pieces
    back = restored(folder, pieces, shard_specs(60, 2), [table])
    for name, shard in store.shards.items():
        assert np.array_equal(back.shards[name].value, shard.value)
        for slot, array in shard.slots.items():
            assert np.array_equal(back.shards[name].slots[slot], array)
    assert contents(back.tables.values()) == contents(store.tables.values())
    waiting = back.tables["t/0"].waiting_ids
    assert len(waiting) == len(store.tables["t/0"].waiting_ids)
    # Later steps give the same results.
    for one in (store, back):
        push_ids(one, "t/0", np.arange(0, 300, 3), step)
    assert contents(back.tables.values()) == contents(store.tables.values())


def test_an_increment_contains_only_written_rows(folder):
    store = a_store(shard_specs(20_000, 1))
    full = saved(store, folder)
    rows = np.arange(10, dtype=np.int64)
    store.execute(Scatter("v/0"), [rows, np.ones((10, 3), F)])
    increment = saved(store, folder, full.mark, stem="c.1")
    assert full.bytes > 240_000
    assert increment.bytes < 1000
    assert saved(store, folder, increment.mark, stem="c.2").bytes < 500


def test_slots_can_be_restored_under_another_optimizer_name(folder):
    specs = shard_specs(4, 1)
    store = a_store(specs)
    adam(store, "v/0", [1], 0)
    written = saved(store, folder)
    back = restored(folder, written.pieces, specs, renamed={"adam": "mine"})
    assert set(back.shards["v/0"].slots) == {"mine/momentum", "mine/velocity"}


def test_a_missing_file_or_shard_is_reported(folder, tmp_path):
    specs = shard_specs(10, 2)
    store = a_store(specs)
    pieces = saved(store, folder).pieces
    with pytest.raises(DataLossError, match="of the 10 rows of v/0"):
        restored(folder, pieces[:1], shard_specs(10, 1))
    (tmp_path / pieces[0].file).unlink()
    with pytest.raises(DataLossError, match="missing"):
        restored(folder, pieces, specs)


def test_a_changed_byte_is_detected_and_its_file_named(folder, tmp_path):
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    store = ShardStore()
    specs, tables = shard_specs(10, 2), table_specs(1)
    for spec in specs:
        store.execute(Create(spec), [rng.random(spec.shape).astype(F)])
    store.execute(CreateTable(tables[0]), [])
    push_ids(store, "t/0", np.arange(20), 1)
    adam(store, "v/1", [7], 1)
    pieces = saved(store, folder, part_bytes=50).pieces
    whole = restored(folder, pieces, specs, tables)
    (file,) = {piece.file for piece in pieces}
    data = (tmp_path / file).read_bytes()
    header_size = 8 + int.from_bytes(data[:8], "little")
    positions = [
        *range(8),
        *rng.integers(8, header_size, 60),
        *rng.integers(header_size, len(data), 60),
    ]
    silent = named = 0
    for position in positions:
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.integers(8)
        (tmp_path / file).write_bytes(damaged)
        try:
            found = restored(folder, pieces, specs, tables)
        except DataLossError as error:
            named += file in str(error)
            continue
        silent += 1  # whitespace, or redundant fields of the header
        assert position < header_size
        assert contents(found.tables.values()) == contents(whole.tables.values())
        for name, shard in whole.shards.items():
            assert np.array_equal(found.shards[name].value, shard.value)
            assert found.shards[name].slots.keys() == shard.slots.keys()
    assert silent <= 6
    assert named + silent == len(positions)


def test_files_without_checksums_are_read(folder):
    store = a_store(shard_specs(10, 1), 1)
    old = [
        msgspec.structs.replace(piece, checksum=None, rows=None)
        for piece in saved(store, folder, part_bytes=50).pieces
    ]
    assert (restored(folder, old, shard_specs(10, 3)).shards["v/2"].value == 1).all()


def test_a_shard_reads_only_the_pieces_with_its_rows(folder, tmp_path):
    specs = shard_specs(10, 2)
    store = a_store(specs, 1)
    first = write_shards(store, call_directly, folder, "c.0", [ShardId("shard", "v/0")], None)
    other = write_shards(store, call_directly, folder, "c.1", [ShardId("shard", "v/1")], None)
    (tmp_path / first.pieces[0].file).unlink()
    back = restored(folder, [*first.pieces, *other.pieces], specs[1:])
    assert (back.shards["v/1"].value == 1).all()


def test_write_keys_are_saved_at_the_moment_of_their_shard(folder):
    specs = shard_specs(100, 1)
    store = a_store(specs)
    count = 0

    def call_and_write(function):
        nonlocal count
        found = function()
        key = WriteKey(coordinator_term=1, closure=count, worker_session=0, number=0)
        store.execute(Assign("v/0", "add", key), [np.ones((100, 3), F)])
        count += 1
        return found

    written = saved(store, folder, between=call_and_write, part_bytes=100)
    back = restored(folder, written.pieces, specs)
    assert (back.shards["v/0"].value == len(written.answers["shard v/0"])).all()
    assert written.coordinator_term == 1


def test_a_slot_of_some_shards_is_kept_and_initialized_in_others(folder):
    store = a_store(shard_specs(10, 2))
    rule = RowWiseAdagradRule(initial_accumulator_value=0.5)
    step = StepParameters(iteration=0, learning_rate=0.1)
    store.execute(Apply("v/1", "o", rule, step), [np.array([7]), np.ones((1, 3), F)])
    back = restored(folder, saved(store, folder).pieces, shard_specs(10, 1))
    slot = back.shards["v/0"].slots["o/accumulator"]
    assert slot.tolist() == [0.5] * 7 + [1.5] + [0.5] * 2


@pytest.mark.parametrize("shape", [(), (0,), (0, 2), (3, 0)])
def test_scalars_and_empty_values_are_saved(folder, shape):
    spec = ShardSpec(name="v", variable="v", shape=shape, dtype="float32", variable_shape=shape)
    store = a_store([spec], 7)
    step = StepParameters(iteration=0, learning_rate=0.5)
    store.execute(Apply("v", "o", ADAM, step), [np.ones(shape, F)])
    back = restored(folder, saved(store, folder).pieces, [spec])
    assert np.array_equal(back.execute(ReadShard("v"))[1][0], store.shards["v"].value)
    for name, slot in store.shards[
        "v"
    ].slots.items():  # without rows, a slot is created by the next step
        assert np.array_equal(back.shards["v"].slots.get(name, np.empty((0, *shape[1:]))), slot)


def test_pieces_before_a_beginning_one_are_ignored(folder):
    store = a_store(shard_specs(4, 1))
    first = saved(store, folder)
    store.execute(
        Apply("v/0", "sgd", SgdRule(), StepParameters(iteration=0, learning_rate=1.0)),
        [np.ones((4, 3), F)],
    )
    second = saved(store, folder, first.mark, "c.1")
    assert list(current_pieces([*first.pieces, *second.pieces])) == list(second.pieces)


def test_saving_a_lost_shard_fails(folder):
    with pytest.raises(NotFoundError, match="no shard v/0 on this server, so it cannot be saved"):
        write_shards(ShardStore(), call_directly, folder, "c.0", [ShardId("shard", "v/0")], None)
