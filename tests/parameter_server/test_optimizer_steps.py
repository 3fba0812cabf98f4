from __future__ import annotations

import pickle

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.parameter_server.optimizer_steps import Gradient
from headrace.parameter_server.partitioners import FixedShardsPartitioner
from headrace.parameter_server.write_context import ClosureRun, write_as
from tests.parameter_server.small_cluster import cluster, in_threads, strategy_at
from tests.parameter_server.small_cluster import servers as parameter_servers

F32 = np.float32


@pytest.fixture
def weights(strategy):
    with strategy.scope():
        return hr.Variable(np.zeros((5, 2), F32), name="weights")


@pytest.fixture
def bias(strategy, weights):
    with strategy.scope():
        return hr.Variable(F32(1.0), name="bias")


OPTIMIZERS = [
    lambda: hr.optimizers.SGD(0.5),
    lambda: hr.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    lambda: hr.optimizers.Adagrad(0.1),
    lambda: hr.optimizers.Adam(0.1),
    lambda: hr.optimizers.Adam(lambda step: 0.1 / (1 + step)),
    lambda: hr.optimizers.Ftrl(0.1),
]


@pytest.mark.catalogue("3.8.9", "3.8.10")
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_shards_equals_training_one_array(make):
    chance = np.random.default_rng(4)
    gradients = [chance.normal(size=(5, 2)).astype(F32) for _ in range(4)]
    found = []
    for servers, partitioner in ((1, None), (2, FixedShardsPartitioner(3))):
        with cluster(servers, partitioner) as strategy, strategy.scope():
            v = hr.Variable(np.ones((5, 2), F32))
            optimizer = make()
            taken = [optimizer.apply_gradients([(each, v)]) for each in gradients]
            assert taken == [1, 2, 3, 4]
            assert optimizer.iterations == 4
            found.append(v.read())
    assert np.array_equal(*found)
    assert not np.array_equal(found[0], np.ones((5, 2), F32))


@pytest.mark.parametrize(
    "make",
    [
        lambda: hr.optimizers.SGD(0.5),
        lambda: hr.optimizers.Adam(0.1),
        lambda: hr.optimizers.Adagrad(0.1, clipvalue=0.2),
        lambda: hr.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    ],
)
def test_shared_values_equal_one_value_per_row(strategy, make):
    chance = np.random.default_rng(8)
    ids = chance.integers(0, 5_000, (8, 600))
    shared = np.broadcast_to(chance.normal(size=(8, 1, 4)).astype(F32), (8, 600, 4))
    found, received = [], []
    for name, values in (("shared", shared), ("own", shared.copy())):
        with strategy.scope():
            rows = hr.Variable(np.ones((5_000, 4), F32))
            table = hr.EmbeddingTable(4, name=name)
            optimizer = make()
        table.lookup(ids[:4])
        before = sum(strategy.cluster.servers.status(each).bytes_in for each in range(2))
        optimizer.apply_gradients([(hr.IndexedSlices(values, ids), each) for each in (rows, table)])
        after = sum(strategy.cluster.servers.status(each).bytes_in for each in range(2))
        received.append(after - before)
        found.append(rows.read().tobytes() + table.gather(ids).tobytes())
    assert found[0] == found[1]
    assert received[0] < received[1] or optimizer.clips_by_norm, "values are sent once"


def test_several_variables_take_one_step_together(weights, bias):
    optimizer = hr.optimizers.SGD(1.0)
    pairs = [(np.ones((5, 2), F32), weights), (2.0, bias), (None, bias)]
    assert optimizer.apply_gradients(pairs) == 1
    assert weights.read().tolist() == (-np.ones((5, 2))).tolist()
    assert bias.read() == -1
    assert optimizer.iterations == 1


@pytest.mark.catalogue("3.8.13")
def test_all_pushing_threads_share_one_step_counter(weights):
    def push(number):
        optimizer = hr.optimizers.SGD(1.0, name="shared")
        for _ in range(20):
            optimizer.apply_gradients([(np.ones((5, 2), F32), weights)])

    in_threads(4, push)
    last = hr.optimizers.SGD(1.0, name="shared")
    assert last.apply_gradients([(np.zeros((5, 2), F32), weights)]) == 81
    assert (weights.read() == -80).all()


def test_the_original_optimizer_sees_the_steps_of_its_copies(strategy, weights):
    with strategy.scope():
        optimizer, other = hr.optimizers.SGD(1.0), hr.optimizers.SGD(1.0)
    copied = pickle.loads(pickle.dumps(optimizer))
    for _ in range(3):
        copied.apply_gradients([(np.ones((5, 2), F32), weights)])
    assert (optimizer.name, other.name) == ("SGD", "SGD_1")
    assert (optimizer.iterations, other.iterations) == (3, 0)


def test_the_norm_of_all_gradients_together_is_clipped(weights, bias):
    optimizer = hr.optimizers.SGD(1.0, global_clipnorm=1.0)
    slices = hr.IndexedSlices(np.array([[3.0, 0.0]], F32), [2])
    optimizer.apply_gradients([(slices, weights), (F32(4.0), bias)])
    assert weights.read()[2, 0] == pytest.approx(-0.6)
    assert bias.read() == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradients_are_rejected_or_skipped_before_any_update(weights, bias, bad):
    gradient = np.ones((5, 2), F32)
    gradient[3, 1] = bad
    pairs = [(F32(1.0), bias), (gradient, weights)]
    with pytest.raises(InvalidArgumentError, match=r"weights.*\[3, 1\]"):
        hr.optimizers.SGD(1.0).apply_gradients(pairs)
    skips = hr.optimizers.SGD(1.0, non_finite="skip")
    assert skips.apply_gradients(pairs) == 0
    assert (bias.read(), weights.read().sum(), skips.iterations) == (1, 0, 0)


def test_invalid_gradient_pairs_are_rejected(weights):
    optimizer = hr.optimizers.SGD(1.0)
    ones = np.ones((5, 2), F32)
    with pytest.raises(TypeError, match=r"pairs of \(gradient, variable\), in this order"):
        optimizer.apply_gradients([(weights, ones)])
    for wrong in ((ones, weights), ones, 1.0, [(ones, weights, "weights")]):
        with pytest.raises(TypeError, match=r"must be pairs of \(gradient, variable\)"):
            optimizer.apply_gradients(wrong)
    assert not weights.read().any()


def test_mismatched_gradients_are_rejected_before_any_update(strategy, weights, bias):
    with strategy.scope():
        whole = hr.Variable([1, 2, 3])
    sgd = hr.optimizers.SGD(1.0)
    good = (F32(1.0), bias)
    cases = [
        (np.ones((5, 3), F32), weights, ValueError, "shape"),
        (np.ones((5, 2), int), weights, TypeError, "floating"),
        (hr.IndexedSlices(np.ones((1, 3), F32), [0]), weights, ValueError, "rows"),
        (hr.IndexedSlices(np.ones((1, 2), F32), [5]), weights, InvalidArgumentError, "= 5"),
        (hr.IndexedSlices(np.ones((1, 2), F32), [0], (6, 2)), weights, ValueError, "6, 2"),
        (np.ones(3, F32), whole, TypeError, "int64"),
        (F32(1.0), bias, ValueError, "several gradients"),
        (F32(1.0), hr.Variable(1.0), TypeError, "scope of a ParameterServerStrategy"),
        (F32(1.0), 3.0, TypeError, "scope of a ParameterServerStrategy"),
    ]
    for gradient, variable, kind, message in cases:
        with pytest.raises(kind, match=message):
            sgd.apply_gradients([good, (gradient, variable)])
    for pairs in ([], [(None, bias)]):
        with pytest.raises(ValueError, match=r"none of .* has a gradient"):
            sgd.apply_gradients(pairs)
    assert bias.read() == 1
    assert sgd.iterations == 0


def test_variables_of_two_clusters_in_one_step_are_rejected(bias):
    with cluster(1) as other, other.scope():
        foreign = hr.Variable(F32(0))
        with pytest.raises(ValueError, match="one cluster"):
            hr.optimizers.SGD(1.0).apply_gradients([(F32(1), bias), (F32(1), foreign)])


@pytest.mark.parametrize("make", [OPTIMIZERS[0], OPTIMIZERS[3]])
def test_a_retried_closure_takes_its_step_once(strategy, weights, make):
    optimizer = pickle.loads(pickle.dumps(make()))
    found = []
    for worker in (0, 1):
        with write_as(ClosureRun(1, 5, worker)):
            optimizer.apply_gradients([(np.ones((5, 2), F32), weights)])
            optimizer.apply_gradients([(hr.IndexedSlices(np.ones((1, 2), F32), [3]), weights)])
        found.append(weights.read())
    assert np.array_equal(*found)
    assert optimizer.iterations == 2


def test_small_dtypes_are_updated_in_float32(strategy):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with strategy.scope():
        v = hr.Variable(np.zeros((4, 2), bfloat16))
    hr.optimizers.SGD(1.0).apply_gradients([(np.ones((4, 2), bfloat16), v)])
    hr.optimizers.SGD(1.0).apply_gradients([(np.ones((4, 2), np.float64), v)])
    assert v.dtype == bfloat16
    assert (v.read() == -2).all()


def test_replicas_of_a_worker_push_the_sum_of_their_gradients_once():
    with cluster(1, replicas=3) as strategy:
        with strategy.scope():
            v = hr.Variable(np.zeros(4, F32), aggregation="SUM")
            plain = hr.Variable(0.0)
        sgd = hr.optimizers.SGD(1.0)

        def step():
            replica = hr.distribute.get_replica_context().replica_id_in_sync_group
            slices = hr.IndexedSlices(np.ones((2, 1), F32).reshape(2), [0, replica])
            return sgd.apply_gradients([(slices, v)])

        with pytest.warns(UserWarning, match="without using `ClusterCoordinator.schedule`"):
            steps = strategy.run(step)
        assert strategy.local_results(steps) == (1, 1, 1)
        assert v.read().tolist() == [-4, -1, -1, 0]
        strategy.run(lambda: v.assign_add(np.ones(4)))
        assert v.read().tolist() == [-1, 2, 2, 3]
        with pytest.raises(ValueError, match="must specify an aggregation method"):
            strategy.run(lambda: plain.assign_add(1.0))


@pytest.mark.filterwarnings("ignore:A `ParameterServerStrategy` method")
def test_replicas_may_update_different_variables():
    with cluster(1, replicas=2) as strategy:
        with strategy.scope():
            a, b = (hr.Variable(np.zeros(2, F32), aggregation="SUM") for _ in range(2))
            one, other = hr.optimizers.SGD(1.0), hr.optimizers.SGD(1.0)

        def replica():
            return hr.distribute.get_replica_context().replica_id_in_sync_group

        def step():
            pairs = [(np.full(2, 1, F32), a), (np.full(2, 10, F32), b)]
            one.apply_gradients(pairs if replica() == 0 else pairs[::-1])
            one.apply_gradients([(np.full(2, 1, F32), (a, b)[replica()])])
            one.apply_gradients([(None, a), pairs[1]] if replica() == 0 else pairs)

        strategy.run(step)
        assert (a.read().tolist(), b.read().tolist()) == ([-4, -4], [-41, -41])
        with pytest.raises(FailedPreconditionError, match="same optimizer, but got SGD, SGD_1"):
            strategy.run(lambda: (one, other)[replica()].apply_gradients([(np.ones(2, F32), a)]))
        with pytest.raises(
            FailedPreconditionError, match="assign_add of 'Variable', assign_add of 'Variable_1'"
        ):
            strategy.run(lambda: (a, b)[replica()].assign_add([1, 1]))
        with pytest.raises(
            FailedPreconditionError, match="assign of 'Variable', assign_sub of 'Variable'"
        ):
            strategy.run(lambda: (a.assign, a.assign_sub)[replica()]([1, 1]))
        assert (a.read().tolist(), b.read().tolist()) == ([-4, -4], [-41, -41])


@pytest.mark.parametrize(
    ("values", "used", "sent"),
    [
        (16, range(16), 16),
        (16, range(2, 16), 16),
        (16, range(3, 16), 13),
        (260, range(10, 260), 260),
    ],
)
def test_shared_values_are_sent_whole_if_most_are_used(values, used, sent):
    shared = np.arange(2 * values, dtype=F32).reshape(values, 2)
    which = np.resize(np.array(used), 1000)
    gradient = Gradient(np.arange(1000), shared, which)
    rows, sent_values, value_indices = gradient.slice_arrays(slice(100, 900))
    assert rows.tolist() == list(range(100, 900))
    assert len(sent_values) == sent
    assert np.array_equal(sent_values[value_indices], shared[which[100:900]])


def test_indexed_slices_check_their_arguments():
    slices = hr.IndexedSlices(np.ones((2, 3, 4)), [[1, 2, 3], [4, 5, 6]])
    assert slices.values.shape == (6, 4)
    assert slices.indices.tolist() == [1, 2, 3, 4, 5, 6]
    assert hr.IndexedSlices(np.zeros((0, 4)), []).indices.dtype == np.int64
    with pytest.raises(TypeError, match="integers"):
        hr.IndexedSlices(np.ones((1, 2)), [0.5])
    with pytest.raises(InvalidArgumentError, match="begin with the axes"):
        hr.IndexedSlices(np.ones((1, 2)), [0, 1])


def test_optimizers_of_one_name_share_steps_and_must_have_one_class(weights):
    mine, other = hr.optimizers.SGD(0.5, name="one"), hr.optimizers.SGD(0.1, name="one")
    other.apply_gradients([(np.ones((5, 2), F32), weights)])
    assert mine.iterations == 1
    with pytest.raises(ValueError, match=r"'one' belongs to an optimizer of class SGD"):
        hr.optimizers.Adam(0.5, name="one")


@pytest.mark.parametrize("made", ["after the strategy", "before the strategy", "in its scope"])
def test_each_unnamed_optimizer_has_its_own_step_counter(made):
    before = [hr.optimizers.Adam(0.1) for _ in range(2)]
    with cluster(2) as strategy:
        with strategy.scope():
            variables = [hr.Variable(np.zeros(3), name=name) for name in ("a", "b")]
            inside = [hr.optimizers.Adam(0.1) for _ in range(2)]
        after = [hr.optimizers.Adam(0.1) for _ in range(2)]
        pair = {"before": before, "in": inside, "after": after}[made.partition(" ")[0]]
        for _ in range(5):
            for optimizer, variable in zip(pair, variables, strict=True):
                optimizer.apply_gradients([(np.ones(3), variable)])
        for variable in variables:
            np.testing.assert_allclose(variable.read(), -0.5, rtol=1e-5)
        assert [each.iterations for each in pair] == [5, 5]
        assert pickle.loads(pickle.dumps(pair[1])).iterations == 5


def test_continued_step_counts_are_logged_unless_restored(tmp_path, caplog):
    def program(restores):
        with strategy_at(started) as strategy:
            with strategy.scope():
                weights = hr.Variable(np.zeros(3), name="weights")
            optimizer, other = hr.optimizers.Adam(0.1), hr.optimizers.Adam(0.1)
            checkpoint = hr.Checkpoint(weights=weights, optimizer=optimizer)
            if restores:
                checkpoint.restore(tmp_path / "ckpt-1")
            caplog.clear()
            for _ in range(3):
                taken = optimizer.apply_gradients([(np.ones(3), weights)])
            checkpoint.save(tmp_path / "ckpt-1")
        assert (optimizer.name, other.name) == ("Adam", "Adam_1")
        return taken, [text for text in caplog.messages if "continues at step" in text]

    with parameter_servers(2) as started:
        assert program(restores=False) == (3, [])
        taken, logged = program(restores=False)
        assert taken == 6
        assert len(logged) == 1
        assert "optimizer 'Adam' continues at step 3" in logged[0]
        assert "another name" in logged[0]
        assert program(restores=True) == (9, [])


def test_iterations_raises_if_the_cluster_is_ambiguous(weights):
    with cluster(1):
        optimizer = hr.optimizers.SGD(0.5)
        with pytest.raises(FailedPreconditionError, match=r"create it in strategy\.scope"):
            optimizer.iterations  # noqa: B018
        optimizer.apply_gradients([(np.ones((5, 2), F32), weights)])
        assert optimizer.iterations == 1


def test_a_step_sends_one_request_to_each_server():
    chance = np.random.default_rng(2)
    ids = chance.integers(0, 4_000, (64, 16))
    own = chance.normal(size=(64, 16, 8)).astype(F32)
    counts = {}
    for servers in (1, 2, 4):
        with cluster(servers, FixedShardsPartitioner(servers)) as strategy, strategy.scope():
            table = hr.Variable(np.zeros((4_000, 8), F32), name="table")
            vector = hr.Variable(np.zeros(8, F32), name="vector")
            sgd = hr.optimizers.SGD(0.1)

            def status(strategy=strategy, servers=servers):
                found = [strategy.cluster.servers.status(each) for each in range(servers)]
                return np.array([(each.requests, each.bytes_in, each.bytes_out) for each in found])

            before = status()
            rows = table.gather(ids)
            pulled = status()
            sgd.apply_gradients([(hr.IndexedSlices(own, ids), table), (rows[0, 0], vector)])
            pushed = status()
            assert (pulled - before)[:, 0].tolist() == [1] * servers
            assert (pushed - pulled)[:, 0].tolist() == [1] * servers
            counts[servers] = ((pulled - before).sum(0)[1:], (pushed - pulled).sum(0)[1:])
    distinct = len(np.unique(ids))
    assert counts[1][0].tolist() == [2 * distinct, 4 * 8 * distinct], "each id once"
    assert counts[1][1].tolist() == [(2 + 4 * 8) * distinct + 4 * 8, 0]
    for found in counts.values():
        assert np.array_equal(found, counts[1])


def test_unnamed_optimizers_in_functions_share_a_counter_or_are_rejected(strategy):
    with strategy.scope():
        users = hr.Variable(np.zeros(3), name="users")
        items = hr.Variable(np.zeros(3), name="items")
        outside = hr.optimizers.Adam(0.1)

    def train(closure, variable, name=None):
        with write_as(ClosureRun(coordinator_term=1, closure=closure, worker_session=1)):
            hr.optimizers.Adam(0.1, name=name).apply_gradients([(np.ones(3), variable)])

    for closure in range(5):
        train(closure, users)
    np.testing.assert_allclose(users.read(), -0.5, rtol=1e-5)
    with pytest.raises(FailedPreconditionError, match=r"class Adam .* trains users, .* items"):
        train(6, items)
    train(7, items, name="items_adam")
    outside.apply_gradients([(np.ones(3), items)])
    np.testing.assert_allclose(items.read(), -0.2, rtol=1e-5)
