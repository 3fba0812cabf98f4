from __future__ import annotations

import pickle

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.parameter_server.write_context import ClosureRun, write_as
from tests.parameter_server.small_cluster import cluster

F32 = np.float32


@pytest.fixture
def table(strategy):
    with strategy.scope():
        return hr.EmbeddingTable(4, name="users")


def test_looked_up_rows_have_the_order_and_shape_of_the_ids(table):
    ids = np.array([[7, -3], [7, 2**62]])
    rows = table.lookup(ids)
    assert rows.shape == (2, 2, 4)
    assert rows.dtype == F32
    assert np.array_equal(rows[0, 0], rows[1, 0])
    assert np.array_equal(table.gather(ids), rows)
    assert table.lookup(5).shape == (4,)
    assert table.lookup([]).shape == (0, 4)


def test_bags_of_ids_become_one_row_each(table):
    ids = np.array([[7, -3, 11], [2**62, 8, 9]])
    pooled = table.lookup(ids, combiner="mean")
    rows = table.gather(ids)
    assert rows.any(axis=2).all(), "looked-up ids have rows"
    total = rows[:, 0] + rows[:, 1] + rows[:, 2]
    assert np.array_equal(pooled, total / F32(3))
    assert np.array_equal(table.gather(ids, combiner="sum"), total)
    assert table.gather(ids[:, :0], combiner="sqrtn").tolist() == [[0.0] * 4] * 2
    with pytest.raises(ValueError, match="'sqrtn', but got 'avg'"):
        table.lookup([[1000]], combiner="avg")
    assert not table.gather([1000]).any(), "no row was created"


def test_initial_values_do_not_depend_on_servers_or_order():
    ids = np.arange(100) * 1_000_003
    found = []
    for servers, order in ((1, ids), (3, ids[::-1])):
        with cluster(servers) as strategy, strategy.scope():
            table = hr.EmbeddingTable(8, name="t", seed=5)
            table.lookup(order[:50])
            table.lookup(order)
            found.append(table.gather(ids))
    assert np.array_equal(*found)
    assert np.abs(found[0]).max() <= 0.05
    assert len(np.unique(found[0])) > 700


@pytest.mark.parametrize(
    ("initializer", "check"),
    [
        ("zeros", lambda rows: (rows == 0).all()),
        (0.5, lambda rows: (rows == 0.5).all()),
        ("normal", lambda rows: rows.std() > 0.01),
        (hr.initializers.Uniform(1.0, 2.0), lambda rows: rows.min() >= 1.0),
    ],
)
def test_tables_use_the_given_initializer(strategy, initializer, check):
    with strategy.scope():
        table = hr.EmbeddingTable(16, name="t", initializer=initializer)
    assert check(table.lookup(range(50)))


def test_gather_creates_no_rows(table):
    assert not table.gather([1, 2, 3]).any()
    table.lookup([2])
    assert table.gather([1, 2, 3]).any(axis=1).tolist() == [False, True, False]


def test_an_id_is_admitted_after_enough_lookups(strategy):
    with strategy.scope():
        table = hr.EmbeddingTable(2, name="t", initializer=1.0, admission=3)
    sgd = hr.optimizers.SGD(1.0)
    assert not table.lookup([5]).any()
    table.apply_gradients(sgd, np.ones((1, 2), F32), [5])
    assert table.lookup([5, 5]).all(), "each occurrence counts"
    table.apply_gradients(sgd, np.ones((2, 2), F32), [5, 5])
    assert table.gather([5]).tolist() == [[-1, -1]]


def test_rows_of_repeated_ids_are_updated_once_by_the_sum(table):
    ids = np.array([3, 9, 3, 3])
    before = table.lookup(ids)
    taken = table.apply_gradients(hr.optimizers.SGD(1.0), np.ones((4, 4), F32), ids)
    change = table.gather(ids) - before
    assert np.allclose(change[:, 0], [-3, -1, -3, -3])
    assert taken == 1


def test_tables_and_variables_take_one_step_together(strategy, table):
    with strategy.scope():
        w = hr.Variable(np.zeros(3, F32), name="w")
    ids = np.arange(10)
    before = table.lookup(ids)
    adam = hr.optimizers.Adam(0.1)
    pairs = [(hr.IndexedSlices(np.ones((10, 4), F32), ids), table), (np.ones(3, F32), w)]
    assert adam.apply_gradients(pairs) == 1
    assert np.allclose(table.gather(ids), before - 0.1, atol=1e-5)
    assert np.allclose(w.read(), -0.1, atol=1e-5)
    assert adam.apply_gradients(pairs[::-1]) == 2


def test_rows_are_written_and_exported(table):
    ids = np.array([5, -7, 5, 10**12])
    table.assign(ids, np.arange(16.0).reshape(4, 4))
    found = {}
    for keys, rows in table.export(limit=1):
        found.update(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))
    assert found == {5: 8, -7: 4, 10**12: 12}
    table.assign([5], 1.0)
    assert table.gather(5).tolist() == [1, 1, 1, 1]


def test_the_capacity_limits_the_number_of_rows(strategy):
    with strategy.scope():
        table = hr.EmbeddingTable(2, name="t", capacity=100)
    for start in range(0, 1000, 50):
        table.lookup(np.arange(start, start + 50))
    assert sum(len(ids) for ids, _ in table.export()) <= 100


@pytest.mark.catalogue("3.7.8")
def test_each_id_is_sent_once(strategy, table):
    before = [strategy.cluster.servers.status(server).bytes_in for server in range(2)]
    table.lookup(np.zeros(1000, np.int64) + 3)
    after = [strategy.cluster.servers.status(server).bytes_in for server in range(2)]
    assert sum(after) - sum(before) == 16, "the id and its count"


def test_a_lookup_of_a_retried_closure_counts_once(strategy):
    with strategy.scope():
        table = hr.EmbeddingTable(2, name="t", initializer=1.0, admission=2)
    for worker in (0, 1):
        with write_as(ClosureRun(1, 1, worker)):
            assert not table.lookup([5]).any()
    assert table.lookup([5]).all()


def test_a_handle_resolves_to_its_table(table):
    assert pickle.loads(pickle.dumps(table)) is table
    assert repr(table) == "<EmbeddingTable 'users' dim=4 dtype=float32 on 2 servers>"
    assert [shard.server for shard in table.shards] == [0, 1]


def test_mismatched_ids_and_gradients_are_rejected(table):
    sgd = hr.optimizers.SGD(1.0)
    with pytest.raises(TypeError, match="must be integers"):
        table.lookup(["a"])
    with pytest.raises(TypeError, match="must be integers"):
        table.gather([1.5])
    with pytest.raises(TypeError, match="IndexedSlices"):
        sgd.apply_gradients([(np.ones((1, 4), F32), table)])
    with pytest.raises(InvalidArgumentError, match="4 floating-point numbers"):
        table.apply_gradients(sgd, np.ones((1, 3), F32), [1])
    with pytest.raises(InvalidArgumentError, match="begin with the axes"):
        table.apply_gradients(sgd, np.ones((2, 4), F32), [1])
    hashes = np.array([2**64 - 1, 5], np.uint64)
    with pytest.raises(InvalidArgumentError, match=r"one is 18446744073709551615; .*view"):
        table.lookup(hashes)
    assert np.array_equal(table.lookup(hashes.view(np.int64)), table.gather([-1, 5]))


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"dim": 0}, ValueError),
        ({"dim": 2.5}, TypeError),
        ({"name": ""}, ValueError),
        ({"initializer": "ones"}, ValueError),
        ({"dtype": "int32"}, ValueError),
        ({"admission": 0}, ValueError),
        ({"capacity": -1}, ValueError),
        ({"evict_after": "long"}, TypeError),
        ({"seed": -1}, ValueError),
    ],
)
def test_invalid_arguments_are_rejected(strategy, wrong, kind):
    given = {"dim": 4, "name": "t"} | wrong
    with strategy.scope(), pytest.raises(kind):
        hr.EmbeddingTable(given.pop("dim"), **given)


def test_a_table_is_created_once_and_only_in_the_scope(strategy, table):
    with pytest.raises(FailedPreconditionError, match="in the scope"):
        hr.EmbeddingTable(4, name="t")
    with strategy.scope(), pytest.raises(ValueError, match="unique"):
        hr.EmbeddingTable(4, name="users")
    inside = pytest.raises(FailedPreconditionError, match="outside of functions")
    with strategy.scope(), write_as(ClosureRun(1, 1, 0)), inside:
        hr.EmbeddingTable(4, name="t2")


def test_the_error_for_a_bag_gradient_suggests_broadcast_to():
    ids, bag_values = np.array([[1, 2, 3], [4, 5, 6]]), np.ones((2, 4), F32)
    with pytest.raises(InvalidArgumentError, match=r"shape \(2, 4\); if the ids of a bag share"):
        hr.IndexedSlices(bag_values, ids)
    shared = hr.IndexedSlices(np.broadcast_to(bag_values[..., None, :], (*ids.shape, 4)), ids)
    assert shared.values.shape == (6, 4)
    with pytest.raises(InvalidArgumentError, match=r"has shape \(5, 4\)$"):
        hr.IndexedSlices(np.ones((5, 4)), [1, 2, 3])
