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
def test_shards_on_servers_learn_as_one_array_does(make):
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
def test_values_that_rows_share_do_the_same_as_a_value_for_each_row(strategy, make):
    chance = np.random.default_rng(8)
    ids = chance.integers(0, 5_000, (8, 600))
    shared = np.broadcast_to(chance.normal(size=(8, 1, 4)).astype(F32), (8, 600, 4))
    found, came = [], []
    for name, values in (("shared", shared), ("own", shared.copy())):
        with strategy.scope():
            rows = hr.Variable(np.ones((5_000, 4), F32))
            table = hr.EmbeddingTable(4, name=name)
            optimizer = make()
        table.lookup(ids[:4])
        before = sum(strategy.cluster.servers.status(each).bytes_in for each in range(2))
        optimizer.apply_gradients([(hr.IndexedSlices(values, ids), each) for each in (rows, table)])
        after = sum(strategy.cluster.servers.status(each).bytes_in for each in range(2))
        came.append(after - before)
        found.append(rows.read().tobytes() + table.gather(ids).tobytes())
    assert found[0] == found[1]
    assert came[0] < came[1] or optimizer.clips_by_norm, "values are sent once"


def test_several_variables_take_one_step_together(weights, bias):
    optimizer = hr.optimizers.SGD(1.0)
    pairs = [(np.ones((5, 2), F32), weights), (2.0, bias), (None, bias)]
    assert optimizer.apply_gradients(pairs) == 1
    assert weights.read().tolist() == (-np.ones((5, 2))).tolist()
    assert bias.read() == -1
    assert optimizer.iterations == 1


@pytest.mark.catalogue("3.8.13")
def test_one_counter_counts_for_all_who_push(weights):
    def push(number):
        optimizer = hr.optimizers.SGD(1.0, name="shared")
        for _ in range(20):
            optimizer.apply_gradients([(np.ones((5, 2), F32), weights)])

    in_threads(4, push)
    last = hr.optimizers.SGD(1.0, name="shared")
    assert last.apply_gradients([(np.zeros((5, 2), F32), weights)]) == 81
    assert (weights.read() == -80).all()


def test_who_only_made_an_optimizer_in_the_scope_knows_what_its_copies_did(strategy, weights):
    with strategy.scope():
        optimizer, other = hr.optimizers.SGD(1.0), hr.optimizers.SGD(1.0)
    there = pickle.loads(pickle.dumps(optimizer))
    for _ in range(3):
        there.apply_gradients([(np.ones((5, 2), F32), weights)])
    assert (optimizer.name, other.name) == ("SGD", "SGD_1")
    assert (optimizer.iterations, other.iterations) == (3, 0)


def test_the_norm_of_all_gradients_together_is_clipped(weights, bias):
    optimizer = hr.optimizers.SGD(1.0, global_clipnorm=1.0)
    slices = hr.IndexedSlices(np.array([[3.0, 0.0]], F32), [2])
    optimizer.apply_gradients([(slices, weights), (F32(4.0), bias)])
    assert weights.read()[2, 0] == pytest.approx(-0.6)
    assert bias.read() == pytest.approx(0.2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_or_passed_over_before_anything_is_applied(
    weights, bias, bad
):
    gradient = np.ones((5, 2), F32)
    gradient[3, 1] = bad
    pairs = [(F32(1.0), bias), (gradient, weights)]
    with pytest.raises(InvalidArgumentError, match=r"weights.*\[3, 1\]"):
        hr.optimizers.SGD(1.0).apply_gradients(pairs)
    skips = hr.optimizers.SGD(1.0, non_finite="skip")
    assert skips.apply_gradients(pairs) == 0
    assert (bias.read(), weights.read().sum(), skips.iterations) == (1, 0, 0)


def test_what_is_no_pair_of_a_gradient_and_a_variable_is_named(weights):
    optimizer = hr.optimizers.SGD(1.0)
    ones = np.ones((5, 2), F32)
    with pytest.raises(TypeError, match=r"pairs are \(gradient, variable\), in this order"):
        optimizer.apply_gradients([(weights, ones)])
    for wrong in ((ones, weights), ones, 1.0, [(ones, weights, "weights")]):
        with pytest.raises(TypeError, match=r"must be pairs of \(gradient, variable\)"):
            optimizer.apply_gradients(wrong)
    assert not weights.read().any()


def test_gradients_that_do_not_fit_are_refused_before_anything_is_applied(strategy, weights, bias):
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
    for gradient, variable, kind, words in cases:
        with pytest.raises(kind, match=words):
            sgd.apply_gradients([good, (gradient, variable)])
    for nothing in ([], [(None, bias)]):
        with pytest.raises(ValueError, match="no gradient"):
            sgd.apply_gradients(nothing)
    assert bias.read() == 1
    assert sgd.iterations == 0


def test_variables_of_two_clusters_take_no_step_together(bias):
    with cluster(1) as other, other.scope():
        stranger = hr.Variable(F32(0))
        with pytest.raises(ValueError, match="one cluster"):
            hr.optimizers.SGD(1.0).apply_gradients([(F32(1), bias), (F32(1), stranger)])


@pytest.mark.parametrize("make", [OPTIMIZERS[0], OPTIMIZERS[3]])
def test_a_closure_that_is_tried_again_takes_its_step_once(strategy, weights, make):
    optimizer = pickle.loads(pickle.dumps(make()))
    found = []
    for worker in (0, 1):
        with write_as(ClosureRun(1, 5, worker)):
            optimizer.apply_gradients([(np.ones((5, 2), F32), weights)])
            optimizer.apply_gradients([(hr.IndexedSlices(np.ones((1, 2), F32), [3]), weights)])
        found.append(weights.read())
    assert np.array_equal(*found)
    assert optimizer.iterations == 2


def test_small_numbers_learn_in_larger_ones(strategy):
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
def test_replicas_that_change_different_variables_each_change_their_own():
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
        with pytest.raises(FailedPreconditionError, match="several optimizers: SGD, SGD_1"):
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
def test_values_that_rows_share_go_whole_where_most_are_used_and_else_those_that_are(
    values, used, sent
):
    shared = np.arange(2 * values, dtype=F32).reshape(values, 2)
    which = np.resize(np.array(used), 1000)
    gradient = Gradient(np.arange(1000), shared, which)
    rows, given, of_each = gradient.slice_arrays(slice(100, 900))
    assert rows.tolist() == list(range(100, 900))
    assert len(given) == sent
    assert np.array_equal(given[of_each], shared[which[100:900]])


def test_slices_are_what_they_say():
    slices = hr.IndexedSlices(np.ones((2, 3, 4)), [[1, 2, 3], [4, 5, 6]])
    assert slices.values.shape == (6, 4)
    assert slices.indices.tolist() == [1, 2, 3, 4, 5, 6]
    assert hr.IndexedSlices(np.zeros((0, 4)), []).indices.dtype == np.int64
    with pytest.raises(TypeError, match="integers"):
        hr.IndexedSlices(np.ones((1, 2)), [0.5])
    with pytest.raises(InvalidArgumentError, match="begin with the axes"):
        hr.IndexedSlices(np.ones((1, 2)), [0, 1])


def test_optimizers_of_one_given_name_share_steps_and_must_be_of_one_class(weights):
    mine, other = hr.optimizers.SGD(0.5, name="one"), hr.optimizers.SGD(0.1, name="one")
    other.apply_gradients([(np.ones((5, 2), F32), weights)])
    assert mine.iterations == 1
    with pytest.raises(ValueError, match=r"'one' belongs to an optimizer of class SGD"):
        hr.optimizers.Adam(0.5, name="one")


@pytest.mark.parametrize("made", ["after the strategy", "before the strategy", "in its scope"])
def test_each_optimizer_without_a_name_counts_its_own_steps(made):
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


def test_a_count_of_an_earlier_program_is_logged_and_one_that_is_restored_is_not(tmp_path, caplog):
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


def test_with_two_clusters_an_optimizer_made_outside_of_both_does_not_guess(weights):
    with cluster(1):
        optimizer = hr.optimizers.SGD(0.5)
        with pytest.raises(FailedPreconditionError, match=r"make it in strategy\.scope"):
            optimizer.iterations  # noqa: B018
        optimizer.apply_gradients([(np.ones((5, 2), F32), weights)])
        assert optimizer.iterations == 1


def test_from_one_to_four_servers_a_step_asks_each_once_and_bytes_stay_the_same():
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


def test_functions_that_make_optimizers_without_a_name_share_a_count_or_are_refused(strategy):
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
    train(7, items, name="of items")
    outside.apply_gradients([(np.ones(3), items)])
    np.testing.assert_allclose(items.read(), -0.2, rtol=1e-5)
