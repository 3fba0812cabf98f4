"""Random operations, with repeated, late and fenced keys, compared with a simple model."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import AbortedError
from headrace.parameter_server.operations import (
    Apply,
    ApplyIds,
    Assign,
    Create,
    CreateTable,
    FenceWrites,
    ForgetWriteKeys,
    GatherIds,
    GatherRows,
    IncrementCounter,
    LookupIds,
    ReadShard,
    Scatter,
)
from headrace.parameter_server.shard_values import SavedServer
from headrace.parameter_server.specs import (
    Constant,
    SgdRule,
    ShardSpec,
    StepParameters,
    TableSpec,
    WriteKey,
)
from headrace.parameter_server.store import (
    ShardStore,
    list_shards,
    restore_snapshot,
    snapshot_server,
    snapshot_shard,
)

ROWS, WIDTH, ADMISSION = 7, 2, 2


class Model:
    """Expected contents: rows as an array, ids as a dictionary, keys as a set."""

    def __init__(self):
        self.rows = np.zeros((ROWS, WIDTH))
        self.table, self.seen = {}, {}
        self.counter = 0
        self.done, self.finished, self.fenced, self.term = {}, set(), set(), 0

    def adopt(self, term):
        if term > self.term:
            self.term = term
            self.done, self.finished, self.fenced = {}, set(), set()

    def rejects(self, key):
        self.adopt(key.coordinator_term)
        return (
            key.coordinator_term < self.term
            or key.worker_session in self.fenced
            or key.closure in self.finished
        )

    def once(self, key, target, change):
        """Execute a write unless its key was executed before; return its answer."""
        if key is None:
            return change()
        key_id = (key.closure, target, key.number)
        if key_id not in self.done:
            self.done[key_id] = change()
        return self.done[key_id]


class StoreTest:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.store, self.model = ShardStore(), Model()
        shape = (ROWS, WIDTH)
        spec = ShardSpec(name="v", variable="v", shape=shape, dtype="float64", variable_shape=shape)
        self.store.execute(Create(shard=spec, initializer=Constant(0.0)))
        table = TableSpec(
            name="t", table="t", dim=WIDTH, dtype="float64", initializer=Constant(1.0),
            admission=ADMISSION,
        )  # fmt: skip
        self.store.execute(CreateTable(table=table))
        self.term = 1

    def number(self, below):
        return int(self.rng.integers(below))

    def key(self):
        if self.number(5) == 0:
            return None
        late = self.number(12) == 0
        return WriteKey(
            coordinator_term=self.term - late, closure=self.number(11) - 2,
            worker_session=self.number(4), number=self.number(3),
        )  # fmt: skip

    def write(self, key, target, operation, arrays, change):
        if key is not None and self.model.rejects(key):
            with pytest.raises(AbortedError):
                self.store.execute(operation, arrays)
            return None
        return self.store.execute(operation, arrays), self.model.once(key, target, change)

    def assign(self):
        key, value = self.key(), self.rng.integers(0, 9, (ROWS, WIDTH)).astype(float)
        mode = ("assign", "add", "sub")[self.number(3)]

        def change():
            old = self.model.rows
            self.model.rows = {"assign": value, "add": old + value, "sub": old - value}[mode]

        self.write(key, "v", Assign(shard="v", mode=mode, key=key), [value], change)

    def scatter(self):
        key, rows = self.key(), self.rng.integers(0, ROWS, self.number(6))
        values = self.rng.integers(0, 9, (len(rows), WIDTH)).astype(float)
        mode = ("add", "sub", "update", "max")[self.number(4)]
        functions = {
            "add": np.add, "sub": np.subtract, "max": np.maximum, "update": lambda _, value: value,
        }  # fmt: skip

        def change():
            self.model.rows = self.model.rows.copy()
            for row, value in zip(rows, values, strict=True):
                self.model.rows[row] = functions[mode](self.model.rows[row], value)

        self.write(key, "v", Scatter(shard="v", mode=mode, key=key), [rows, values], change)

    def apply(self):
        key, rows = self.key(), self.rng.integers(0, ROWS, self.number(6))
        values = self.rng.integers(0, 9, (len(rows), WIDTH)).astype(float)
        step = StepParameters(iteration=0, learning_rate=0.5)
        operation = Apply(shard="v", optimizer="o", rule=SgdRule(), step=step, key=key)

        def change():
            self.model.rows = self.model.rows.copy()
            np.subtract.at(self.model.rows, rows, 0.5 * values)

        self.write(key, "v", operation, [rows, values], change)

    def count(self):
        key, by = self.key(), self.number(4)

        def change():
            before = self.model.counter
            self.model.counter += by
            return before, self.model.counter

        result = self.write(key, "c", IncrementCounter(counter="c", delta=by, key=key), [], change)
        if result is not None:
            (answer, _), expected = result
            assert (answer.before, answer.after) == expected

    def lookup(self):
        key, ids = self.key(), self.rng.integers(-6, 6, self.number(7))

        def change():
            for one in ids.tolist():
                self.model.seen[one] = self.model.seen.get(one, 0) + 1
            for one in ids.tolist():
                if self.model.seen[one] >= ADMISSION:
                    self.model.table.setdefault(one, np.ones(WIDTH))

        result = self.write(key, "t", LookupIds(table="t", key=key), [ids], change)
        if result is not None:
            self.compare_ids(ids, result[0][1][0])

    def apply_ids(self):
        key, ids = self.key(), self.rng.integers(-6, 6, self.number(7))
        values = self.rng.integers(0, 9, (len(ids), WIDTH)).astype(float)
        step = StepParameters(iteration=0, learning_rate=0.5)
        operation = ApplyIds(table="t", optimizer="o", rule=SgdRule(), step=step, key=key)

        def change():
            for one, value in zip(ids.tolist(), values, strict=True):
                if one in self.model.table:
                    self.model.table[one] = self.model.table[one] - 0.5 * value

        self.write(key, "t", operation, [ids, values], change)

    def late_fences(self):
        """Check that requests of an earlier coordinator have no effect."""
        late = self.term - 1
        self.store.execute(FenceWrites(coordinator_term=late, worker=self.number(4)))
        self.store.execute(ForgetWriteKeys(coordinator_term=late, closures=(), below=9))

    def forget(self):
        closure, below = self.number(11) - 2, self.number(4) if self.number(4) == 0 else 0
        self.store.execute(
            ForgetWriteKeys(coordinator_term=self.term, closures=(closure,), below=below)
        )
        self.model.adopt(self.term)
        self.model.finished |= {closure, *range(below)}  # negative numbers have no order
        self.model.done = {
            which: answer
            for which, answer in self.model.done.items()
            if which[0] not in self.model.finished
        }

    def fence(self):
        worker = self.number(4)
        self.store.execute(FenceWrites(coordinator_term=self.term, worker=worker))
        self.model.adopt(self.term)
        self.model.fenced.add(worker)

    def new_coordinator(self):
        self.term += 1
        self.store.execute(FenceWrites(coordinator_term=self.term))
        self.model.adopt(self.term)

    def restore_server(self):
        """Replace the store by one restored from its snapshot."""
        again = ShardStore()
        for holding in list_shards(self.store):
            restore_snapshot(again, snapshot_shard(self.store, holding))
        saved = snapshot_server(self.store)
        assert isinstance(saved.record, SavedServer)
        restore_snapshot(again, saved)
        self.store = again

    def compare_ids(self, ids, found):
        zeros = np.zeros(WIDTH)
        expected = [self.model.table.get(one, zeros).tolist() for one in ids.tolist()]
        assert found.shape == (len(ids), WIDTH)
        assert found.tolist() == expected

    def compare(self):
        assert self.store.execute(ReadShard(shard="v"))[1][0].tolist() == self.model.rows.tolist()
        rows = self.rng.integers(0, ROWS, 3)
        gathered = self.store.execute(GatherRows(shard="v"), [rows])[1][0]
        assert gathered.tolist() == self.model.rows[rows].tolist()
        ids = np.arange(-6, 6)
        self.compare_ids(ids, self.store.execute(GatherIds(table="t"), [ids])[1][0])
        assert self.store.counters.get("c", 0) == self.model.counter
        assert len(self.store.write_keys) == len(self.model.done)


MOVES = [
    (StoreTest.assign, 2), (StoreTest.scatter, 4), (StoreTest.apply, 4), (StoreTest.count, 2),
    (StoreTest.lookup, 4), (StoreTest.apply_ids, 4), (StoreTest.forget, 3), (StoreTest.fence, 0.4),
    (StoreTest.new_coordinator, 0.4),
    (StoreTest.restore_server, 0.5), (StoreTest.late_fences, 0.4),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_store_behaves_like_its_model(seed):
    test = StoreTest(seed)
    weights = np.array([weight for _, weight in MOVES])
    for step in range(60):
        move = MOVES[test.rng.choice(len(MOVES), p=weights / weights.sum())][0]
        try:
            move(test)
            test.compare()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {step}: {move.__name__}") from error
