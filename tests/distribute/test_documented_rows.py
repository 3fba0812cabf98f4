"""Rows of the catalogue of distribution (tests/docs/CATALOGUE.md) that no other test covers."""

from __future__ import annotations

import json

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    PerReplicaSpec,
    get_replica_context,
    get_strategy,
    has_strategy,
)
from headrace.distribute.batch_inputs import global_batch_size
from headrace.distribute.input_streams import auto_shard
from headrace.errors import InvalidArgumentError, OutOfRangeError
from tests.distribute.replicas import BALANCED, mirrored, on_worker, rows, split, with_policy

numbers = hr.Dataset.range


def replica_id():
    return get_replica_context().replica_id_in_sync_group


def made(value, **kwargs):
    strategy = mirrored(2)
    with strategy.scope():
        return strategy, hr.Variable(value, **kwargs)


# --- strategies and scopes ----------------------------------------------------------------------


@pytest.mark.catalogue("1.1.11")
def test_experimental_names_are_aliases():
    strategy = mirrored(2)
    data = numbers(4).batch(4)
    (step,) = strategy.experimental_distribute_dataset(data)
    assert rows(step) == [[0, 1], [2, 3]]
    (step,) = strategy.experimental_distribute_datasets_from_function(lambda context: data)
    assert rows(step) == [[0, 1, 2, 3], []]
    values = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    assert strategy.experimental_local_results(values) == (0, 1)


@pytest.mark.catalogue("3.31.26-29")
def test_the_default_strategy_changes_nothing():
    strategy = get_strategy()
    with strategy.scope():
        assert not has_strategy()
        assert hr.Variable(2.0).read() == 2.0
    assert strategy.run(lambda x: x + 1, args=(1,)) == 2
    data = numbers(10).batch(2)
    for distributed in (
        strategy.distribute_dataset(data),
        strategy.distribute_datasets_from_function(lambda context: data),
    ):
        assert next(iter(distributed)).tolist() == [0, 1]
    assert strategy.distribute_values_from_function(lambda context: 7) == 7


@pytest.mark.catalogue("3.31.4-6")
def test_a_scope_must_be_left_where_it_was_entered():
    strategy = mirrored(2)
    outer, inner = strategy.scope(), mirrored(2)
    with pytest.raises(RuntimeError, match="must be left in the thread"):
        outer.__exit__(None, None, None)
    with outer, pytest.raises(RuntimeError, match="Mixing different Strategy objects"):
        inner.scope().__exit__(None, None, None)
    assert not has_strategy()


@pytest.mark.catalogue("1.5.2", "1.5.3")
def test_mirrored_strategy_ignores_tf_config(monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    strategy = MirroredStrategy(["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/cpu:1"])
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1")
    assert (strategy.num_replicas_in_sync, strategy.cluster_resolver) == (2, None)
    assert MirroredStrategy([]).extended.worker_devices == ("cpu:0",)


@pytest.mark.catalogue(
    "1.1.17", "1.1.18", "1.3.5", "1.5.7", "1.10.7", "3.31.8", "3.31.9", "3.31.14-18"
)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("experimental_set_strategy", r"with strategy\.scope\(\)"),
        ("RunOptions", "leave it out"),
        ("CommunicationOptions", "timeout="),
        ("NcclAllReduce", "leave it out"),
        ("GCEClusterResolver", "SimpleClusterResolver"),
        ("SageMakerClusterResolver", "SimpleClusterResolver"),
        ("TPUClusterResolver", "SimpleClusterResolver"),
    ],
)
def test_missing_names_raise_with_their_replacement(name, words):
    with pytest.raises(AttributeError, match=f"{name}.*use instead: .*{words}"):
        getattr(hr.distribute, name)
    of_extended = {
        "reduce_to": r"strategy\.reduce",
        "batch_reduce_to": r"strategy\.reduce",
        "update": r"variable\.assign",
        "experimental_make_numpy_dataset": "from_tensor_slices",
    }
    for absent, instead in of_extended.items():
        with pytest.raises(AttributeError, match=f"{absent}.*{instead}"):
            getattr(mirrored(2).extended, absent)


@pytest.mark.catalogue("1.1.8", "3.15.15", "3.15.16", "3.30.15-17")
def test_reducing_indexed_slices_raises():
    strategy = mirrored(2)
    slices = PerReplica([hr.IndexedSlices(np.ones((1, 2)), [0])] * 2)
    for use in (
        lambda: strategy.reduce("SUM", slices),
        lambda: strategy.gather(slices, 0),
        lambda: strategy.run(
            lambda x: get_replica_context().all_reduce("SUM", [x, x]), args=(slices,)
        ),
        lambda: strategy.run(lambda x: get_replica_context().all_gather(x, 0), args=(slices,)),
    ):
        with pytest.raises(InvalidArgumentError, match=r"IndexedSlices.*all_gather"):
            use()


@pytest.mark.catalogue("3.15.7-10")
@pytest.mark.parametrize("axis", [0, 1])
def test_lengths_may_differ_along_either_axis(axis):
    strategy = mirrored(3)

    def value():
        shape = [2, 2]
        shape[axis] = replica_id() + 1
        return np.zeros(shape)

    values = strategy.run(value)
    assert strategy.gather(values, axis).shape[axis] == 6
    gathered = strategy.run(lambda x: get_replica_context().all_gather(x, axis), args=(values,))
    assert [each.shape[axis] for each in gathered.values] == [6, 6, 6]
    with pytest.raises(InvalidArgumentError, match="Shape mismatch"):
        strategy.run(lambda x: get_replica_context().all_gather(x, 1 - axis), args=(values,))


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.catalogue("2.2.10", "4.3.1")
@pytest.mark.parametrize("policy", list(AutoShardPolicy))
def test_the_split_is_the_same_under_every_policy(policy, tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("".join(f"{row}\n" for row in range(10)))
    ceil = [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]]
    balanced = [[[0, 1], [2], [3]], [[4, 5], [6], [7]], [[8, 9], [], []]]
    for dataset in (numbers(10), hr.TextLineDataset(str(path)).map(int)):
        plan = with_policy(dataset.batch(4), policy.name)
        assert split(plan, 3) == ceil
        assert split(plan, 3, BALANCED) == balanced


@pytest.mark.catalogue("3.12.17", "3.12.18")
def test_every_policy_is_accepted():
    for policy in AutoShardPolicy:
        assert split(with_policy(numbers(2).batch(2), policy.name), 2) == [[[0], [1]]]


@pytest.mark.catalogue("2.2.2", "3.13.19-25")
@pytest.mark.parametrize(
    ("dataset", "size"),
    [
        (numbers(32).batch(4), 4),
        (numbers(32).batch(4, drop_remainder=True), 4),
        (numbers(32).batch(4).take(5), 4),
        (numbers(32).padded_batch(4), 4),
        (numbers(32).batch(4).shuffle(3).repeat(2).prefetch(1), 4),
        (numbers(32).batch(4).map(lambda x: x), None),
        (hr.Dataset.zip(numbers(8).batch(4), numbers(8).batch(4)), 4),
        (hr.Dataset.zip(numbers(8).batch(4), numbers(8).batch(8)), None),
    ],
)
def test_the_global_batch_size_is_that_of_the_last_batch_step(dataset, size):
    assert global_batch_size(dataset.plan) == size


@pytest.mark.catalogue("3.13.15")
def test_nested_batches_are_split_along_the_outer_axis():
    first, last = split(numbers(10).batch(2).batch(4), 2)
    assert first == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert last == [[[8, 9]], []]


@pytest.mark.catalogue("3.14.8")
def test_a_last_batch_of_six_is_split_into_three_and_three():
    steps = [on_worker(numbers(14).batch(8), worker)[1] for worker in range(2)]
    assert steps == [[[8, 9, 10]], [[11, 12, 13]]]


@pytest.mark.catalogue("3.10.14", "3.10.15")
def test_batches_of_ten_are_split_into_fives_or_kept():
    data = numbers(100).batch(10)
    assert [len(step) for step in split(data, 1)] == [10] * 10
    assert [[len(part) for part in step] for step in split(data, 2)] == [[5, 5]] * 10
    for worker in range(2):
        assert [len(part) for (part,) in on_worker(data, worker)] == [5] * 10


@pytest.mark.catalogue("3.36.19")
def test_rows_of_size_zero_are_split_as_rows():
    (step,) = mirrored(2).distribute_dataset(
        hr.Dataset.from_tensor_slices({"x": np.zeros((5, 0)), "n": np.arange(5)}).batch(5)
    )
    assert [value.shape for value in step["x"].values] == [(3, 0), (2, 0)]
    assert rows(step["n"]) == [[0, 1, 2], [3, 4]]


@pytest.mark.catalogue("3.10.22-24")
def test_rows_of_different_lengths_are_padded_before_they_are_distributed():
    data = numbers(20).map(lambda i: np.full(i % 4, i)).padded_batch(8)
    steps = list(mirrored(2).distribute_dataset(data))
    assert rows(steps[0])[0] == [[0, 0, 0], [1, 0, 0], [2, 2, 0], [3, 3, 3]]
    assert rows(steps[0])[1] == [[0, 0, 0], [5, 0, 0], [6, 6, 0], [7, 7, 7]]
    assert sum(int(value.sum()) for step in steps for value in step.values) == 310


@pytest.mark.catalogue("3.36.1-9")
@pytest.mark.parametrize(
    ("dataset", "size", "drop", "batches"),
    [
        (numbers(8).batch(4), 2, False, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (numbers(5).batch(4), 2, False, [[0, 1], [2, 3], [4]]),
        (numbers(5).batch(4), 2, True, [[0, 1], [2, 3]]),
        (numbers(12).batch(4), 6, False, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (numbers(5).batch(3), 3, False, [[0, 1, 2], [3, 4]]),
        (numbers(8).batch(2).batch(4), 2, False, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    ],
)
def test_batches_of_another_size_are_made_by_rebatch(dataset, size, drop, batches):
    again = dataset.rebatch(size, drop)
    assert [batch.tolist() for batch in again] == batches
    named = dataset.map(lambda x: {"a": (x, {"b": x})}).rebatch(size, drop)
    assert [batch["a"][1]["b"].tolist() for batch in named] == batches
    iterator, other = iter(again), iter(again)
    next(iterator)
    other.set_state(iterator.get_state())
    assert [batch.tolist() for batch in other] == batches[1:]


# --- sharing among workers ----------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    for index in range(10):
        lines = (f"{10 * index + line}\n" for line in range(4))
        (tmp_path / f"{index}.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.catalogue("2.3.10")
def test_four_files_on_two_workers_are_those_of_the_table(files):
    names = [str(files / f"{index}.txt") for index in range(4)]
    data = with_policy(hr.TextLineDataset(names).map(int).batch(3), "FILE")
    shares = [hr.Dataset(auto_shard(data.plan, InputContext(2, w, 2)).plan) for w in range(2)]
    assert [[batch.tolist() for batch in share] for share in shares] == [
        [[0, 1, 2], [3, 20, 21], [22, 23]],
        [[10, 11, 12], [13, 30, 31], [32, 33]],
    ]


@pytest.mark.catalogue("3.12.12")
def test_generated_file_names_are_sharded_as_files(files):
    data = numbers(10).map(lambda i: str(files / f"{i}.txt")).flat_map(hr.TextLineDataset)
    share = auto_shard(with_policy(data.map(int), "FILE").plan, InputContext(5, 3, 5)).plan
    assert [int(row) for row in hr.Dataset(share)] == [30, 31, 32, 33, 80, 81, 82, 83]


@pytest.mark.catalogue("3.11.11")
def test_files_of_five_and_nine_lines_are_read_to_the_end(tmp_path):
    for name, count in (("0", 5), ("1", 9)):
        (tmp_path / name).write_text("".join(f"{name}{line}\n" for line in range(count)))

    def dataset_fn(context):
        names = hr.Dataset.list_files(str(tmp_path / "*"), shuffle=False)
        lines = names.flat_map(hr.TextLineDataset)
        return lines.shard(context.num_input_pipelines, context.input_pipeline_id).batch(4)

    distributed = mirrored(2).distribute_datasets_from_function(dataset_fn)
    steps = list(distributed)
    assert [[len(part) for part in step.values] for step in steps] == [[4, 4], [4, 2]]
    assert steps[1].values[1].tolist() == [b"17", b"18"]
    assert distributed.element_spec == iter(distributed).element_spec


@pytest.mark.catalogue("3.10.19")
def test_four_numbers_on_two_workers_follow_the_policy():
    data = numbers(4).batch(2)
    auto = [on_worker(with_policy(data, "AUTO"), worker) for worker in range(2)]
    assert auto == [[[[0]], [[2]]], [[[1]], [[3]]]]
    off = [on_worker(with_policy(data, "OFF"), worker) for worker in range(2)]
    assert off == [[[[0]], [[1]], [[2]], [[3]]]] * 2


@pytest.mark.catalogue("3.12.26")
def test_a_worker_index_out_of_range_is_rejected():
    for context in ((2, 2, 2), (0, 0, 1), (2, -1, 2)):
        with pytest.raises(ValueError, match="must be at"):
            InputContext(*context)


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.catalogue("3.10.3")
@pytest.mark.parametrize("from_function", [False, True])
def test_one_device_reads_ten_steps_in_every_way_and_repeatedly(from_function):
    strategy = OneDeviceStrategy()
    distributed = (
        strategy.distribute_datasets_from_function(lambda context: numbers(10))
        if from_function
        else strategy.distribute_dataset(numbers(10))
    )
    for _ in range(2):
        assert [int(step) for step in distributed] == list(range(10))
        iterator = iter(distributed)
        assert [int(iterator.get_next()) for _ in range(10)] == list(range(10))
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()
        iterator = iter(distributed)
        found = [int(iterator.get_next_as_optional().get_value()) for _ in range(10)]
        assert found == list(range(10))


@pytest.mark.catalogue("3.10.7", "3.10.8")
def test_pairs_are_delivered_in_turn():
    pairs = numbers(10).map(lambda i: (i, i**2))
    steps = list(mirrored(2).distribute_datasets_from_function(lambda context: pairs))
    assert [(step[0].values, step[1].values) for step in steps] == [
        ((i, i + 1), (i**2, (i + 1) ** 2)) for i in range(0, 10, 2)
    ]


@pytest.mark.catalogue("1.4.6", "3.10.9")
def test_steps_can_be_enumerated():
    for replicas, first in ((1, [0, 1]), (2, [[0], [1]])):
        steps = enumerate(mirrored(replicas).distribute_dataset(numbers(10).batch(2)))
        found = [(number, rows(step)) for number, step in steps]
        assert [number for number, _ in found] == list(range(5))
        assert found[0][1] == first


@pytest.mark.catalogue("3.10.31", "3.10.32")
def test_with_two_batches_read_ahead_the_values_are_the_same():
    options = InputOptions(experimental_per_replica_buffer_size=2)
    strategy = mirrored(2)
    data = numbers(1, 11).batch(5)
    (step,) = strategy.distribute_datasets_from_function(lambda context: data, options)
    assert rows(step) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    (step,) = strategy.distribute_dataset(numbers(1, 11).batch(10), options)
    assert rows(step) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


@pytest.mark.catalogue("3.11.12")
def test_the_spec_of_datasets_from_a_function_has_unknown_row_counts():
    strategy = mirrored(2)
    whole = numbers(8).batch(2, drop_remainder=True)
    distributed = strategy.distribute_datasets_from_function(lambda context: whole)
    pair = hr.ArraySpec((2,), np.int64)
    assert distributed.element_spec == PerReplicaSpec(pair, pair)
    odd = strategy.distribute_datasets_from_function(lambda context: whole.take(3))
    some = hr.ArraySpec((None,), np.int64)
    assert odd.element_spec == PerReplicaSpec(some, some)


# --- training loops -----------------------------------------------------------------------------


@pytest.mark.catalogue("3.10.21")
def test_a_variable_accumulates_sums_over_an_epoch():
    strategy, total = made(0, aggregation="SUM")
    steps = strategy.distribute_datasets_from_function(lambda context: numbers(10))
    for step in steps:
        strategy.run(lambda x: total.assign_add(x * x), args=(step,))
    assert total.read() == 285


@pytest.mark.catalogue("3.26.1", "3.26.2")
def test_constants_and_unused_results_of_training_loops():
    strategy, counter = made(0.0, aggregation="MEAN")
    assert strategy.run(np.square, args=(np.float64(2.0),)).values == (4.0, 4.0)

    def step():
        counter.assign_add(1.0)
        return 2.0

    strategy.run(step)
    assert counter.read() == 1.0


@pytest.mark.catalogue("3.26.19", "3.26.20")
def test_variables_of_training_loops_have_the_documented_numbers():
    strategy, counter = made(1, aggregation="ONLY_FIRST_REPLICA")
    data = hr.Dataset.from_tensor_slices(np.array([5.0, 6, 7, 8])).batch(2)

    def step(x):
        counter.assign_add(1)
        return x

    product = 2.0
    for batch in strategy.distribute_dataset(data):
        product *= strategy.reduce("MEAN", strategy.run(step, args=(batch,)), axis=0)
    assert (product, counter.read()) == (82.5, 3)

    strategy, total = made(0.0, aggregation="SUM")
    iterator = iter(strategy.distribute_dataset(data))
    for _ in range(2):
        strategy.run(lambda x: total.assign_add(x.sum()), args=(iterator.get_next(),))
    with pytest.raises(OutOfRangeError):
        iterator.get_next()
    assert total.read() == 26


@pytest.mark.catalogue("3.26.27-31")
def test_uneven_steps_of_training_loops():
    strategy = mirrored(2)

    def of(data, batch, drop=False):
        return hr.Dataset.from_tensor_slices(np.array(data)).batch(batch, drop)

    (step,) = strategy.distribute_dataset(of([5.0, 6, 7], 4))
    assert strategy.run(np.size, args=(step,)).values == (2, 1)
    (step,) = strategy.distribute_dataset(of([5.0, 6], 2, drop=True))
    assert rows(step) == [[5.0], [6.0]]
    first, second = strategy.distribute_dataset(of([5.0, 6], 1, drop=True))
    assert (rows(first), rows(second)) == ([[5.0], []], [[6.0], []])
    steps = strategy.distribute_datasets_from_function(
        lambda context: hr.Dataset.from_generator(lambda: [np.array([1.0, 2]), np.array([2.0])])
    )
    (step,) = steps
    assert strategy.run(np.mean, args=(step,)).values == (1.5, 2.0)
    (step,) = strategy.distribute_dataset(of([5.0], 1))
    squares, fixed = strategy.run(lambda x: (x**2, np.zeros(3)), args=(step,))
    assert rows(squares) == [[25.0], []]
    assert rows(fixed) == [[0.0] * 3] * 2


# --- variables ----------------------------------------------------------------------------------


@pytest.mark.catalogue("3.30.10")
@pytest.mark.parametrize(("method", "value"), [("assign", 1), ("assign_add", 8), ("assign_sub", 2)])
def test_two_updates_on_the_replicas_change_every_copy(method, value):
    for aggregation in ("NONE", "MEAN", "ONLY_FIRST_REPLICA"):
        strategy, v = made(5.0, aggregation=aggregation)

        def step(v=v):
            getattr(v, method)(np.float64(2.0))
            getattr(v, method)(1.0)

        strategy.run(step)
        assert v.values == (value, value)


@pytest.mark.catalogue("3.33.10-12")
def test_a_variable_of_seven_acts_as_the_number():
    _, v = made(7, aggregation="SUM")
    assert [v + 1, v - 1, v * 2, v // 2, v % 4, v**2, v & 3, v | 8, v ^ 1, v << 1, v >> 1] == [
        8, 6, 14, 3, 3, 49, 3, 15, 6, 14, 3,
    ]  # fmt: skip
    assert [1 + v, 8 - v, 21 / v, 50 // v, 50 % v, 2**v, -v, abs(v), ~v] == [
        8, 1, 3, 7, 1, 128, -7, 7, -8,
    ]  # fmt: skip
    assert [v == 7, v != 7, v < 8, v <= 7, v > 8, v >= 7] == [True, False, True, True, False, True]
    assert (float(v), int(v), bool(v)) == (7.0, 7, True)
    with pytest.raises((TypeError, IndexError)):
        _ = v[0]
    with pytest.raises(AttributeError):
        _ = v.nothing


@pytest.mark.catalogue("3.33.41")
def test_assign_accepts_the_arguments_of_tf_variable():
    _, v = made([1.0, 2.0])
    assert v.assign([3.0, 4.0], True, "a", True).tolist() == [3.0, 4.0]
    v.assign_add([1.0, 1.0], use_locking=False, name="b", read_value=False)
    v.assign_sub([2.0, 2.0], use_locking=None, name=None, read_value=True)
    assert v.read().tolist() == [2.0, 3.0]


@pytest.mark.catalogue("3.34.2-11")
def test_writes_and_reads_have_the_documented_numbers():
    strategy, v = made(1.0, aggregation="ONLY_FIRST_REPLICA")
    _, other = strategy, hr.Variable(2.0)
    assert v.assign(other) == 2.0
    assert v.assign(3.0) == 3.0
    assert v.values == (3.0, 3.0)
    assert strategy.run(lambda: v.assign(float(replica_id()))).values == (0.0, 0.0)
    for aggregation, sum_of_two in (("SUM", 4.0), ("MEAN", 2.0), ("ONLY_FIRST_REPLICA", 2.0)):
        strategy, v = made(0.0, aggregation=aggregation)
        strategy.run(v.assign, args=(PerReplica([2.0, 2.0]),))
        assert v.values == (sum_of_two, sum_of_two)
    strategy, v = made(1.0, aggregation="MEAN")
    read = strategy.run(lambda: (v.assign_add(1.0), v.read(), v.value(), v.read_value()))
    assert [each.values for each in read] == [(2.0, 2.0)] * 4
    assert (v.read(), v.value(), v + 1) == (2.0, 2.0, 3.0)
    assert strategy.run(lambda: v + 1).values == (3.0, 3.0)


@pytest.mark.catalogue("3.34.25-32")
def test_on_read_variables_have_the_documented_numbers():
    for aggregation, read in (("SUM", 1.0), ("MEAN", 0.5), ("ONLY_FIRST_REPLICA", 0.0)):
        kinds = {"aggregation": aggregation, "synchronization": "ON_READ"}
        strategy, v = made(0.0, **kinds)
        own = strategy.run(lambda v=v: v.assign(replica_id()))
        assert own.values == v.values == (0.0, 1.0)
        assert v.read() == read
        strategy, v = made(0.0, **kinds)
        v.assign(2)
        assert v.read() == 2.0
        other = hr.Variable(3.0)
        assert strategy.run(lambda v=v, o=other: v.assign(o)).values == (3.0, 3.0)
    strategy, v = made(0.0, aggregation="MEAN", synchronization="ON_READ")
    strategy.run(lambda: v.assign(replica_id()))
    assert v + 1 == 1.5
    assert strategy.run(lambda: v + 1).values == (1.0, 2.0)
    before = strategy.run(lambda: (v.assign(replica_id() * 4), v.read())[1])
    assert (before.values, v.read()) == ((0.0, 4.0), 2.0)


@pytest.mark.catalogue("3.33.47-49")
def test_replicas_compute_with_values_of_different_lengths():
    strategy = mirrored(2)
    values = PerReplica([np.array([1]), np.array([5, 6])])
    assert rows(strategy.run(lambda x: x + 10, args=(values,))) == [[11], [15, 16]]
    assert rows(strategy.run(lambda x: x, args=({"a": values},))["a"]) == [[1], [5, 6]]


ON_READ = {"synchronization": "ON_READ"}


@pytest.mark.catalogue("3.33.16-28", "3.34.14", "3.34.15")
@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ({}, 3.0),
        ({"aggregation": "SUM"}, 3.0),
        ({"aggregation": "SUM", **ON_READ}, 7.0),
        ({"aggregation": "MEAN", **ON_READ}, 3.5),
    ],
)
def test_a_variable_is_saved_as_one_value_and_restored_to_all_copies(kind, saved, tmp_path):
    strategy, v = made(0.0, **kind)
    if kind.get("synchronization"):
        strategy.run(lambda: v.assign(3.0 + replica_id()))
        assert v.values == (3.0, 4.0)
    else:
        v.assign(3.0)
    path = hr.Checkpoint(v=v).save(tmp_path / "saved")
    copies = {
        "plain": ({}, (saved, saved)),
        "sum": ({"aggregation": "SUM", **ON_READ}, (saved / 2, saved / 2)),
        "mean": ({"aggregation": "MEAN", **ON_READ}, (saved, saved)),
    }
    for name, (other, restored) in copies.items():
        _, w = made(9.0, **other)
        hr.Checkpoint(v=w).restore(path).assert_consumed()
        assert w.values == restored, name
        assert w.read() == saved
    local = hr.Variable(9.0)
    hr.Checkpoint(v=local).restore(path)
    assert local.read() == saved
