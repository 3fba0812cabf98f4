"""Programs of workers in tests: each function runs on one worker."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import time
from pathlib import Path

import ml_dtypes
import numpy as np

import headrace as hr
from headrace.distribute import (
    InputOptions,
    InputReplicationMode,
    MultiWorkerMirroredStrategy,
    PerReplica,
    get_replica_context,
)
from tests.distribute.replicas import rows, steps_of, with_policy

numbers = hr.Dataset.range


def strategy(here=1, **options):
    devices = [f"cpu:{index}" for index in range(here)]
    return MultiWorkerMirroredStrategy(devices=devices, **options)


def read_files(names, shuffle=None):
    dataset = hr.Dataset.from_tensor_slices(sorted(names))
    if shuffle:
        dataset = dataset.shuffle(len(names))
    return dataset.interleave(hr.TextLineDataset, cycle_length=1).map(lambda line: np.int64(line))


def who_is_there(here):
    s = strategy(here)
    return s.num_replicas_in_sync, s.first_replica, str(s._input_context()), s._seed


# --- input ---------------------------------------------------------------------------------------


def steps(source, batch, policy, here=1, options=None, drop=False):
    dataset = numbers(source) if isinstance(source, int) else read_files(source)
    dataset = with_policy(dataset.batch(batch, drop), policy)
    return steps_of(strategy(here).distribute_dataset(dataset, options))


def specs():
    s = strategy()
    distributed = s.distribute_dataset(numbers(8).batch(4, drop_remainder=True))
    (first, _) = distributed
    return str(distributed.element_spec), type(first).__name__, distributed.cardinality()


def mapped_to_dicts():
    s = strategy(2)
    dataset = numbers(5).map(lambda i: {"i": i, "name": str(int(i)).encode()}).batch(4)
    return [
        [(each["i"].tolist(), each["name"].tolist()) for each in s.local_results(step)]
        for step in s.distribute_dataset(dataset)
    ]


def from_function(kind):
    s = strategy()

    def dataset_fn(context):
        index, pipelines = context.input_pipeline_id, context.num_input_pipelines
        if kind == "repeated":
            return numbers(100).repeat().batch(5).shard(pipelines, index)
        if kind == "partial":
            size = context.get_per_replica_batch_size(8)
            return numbers(14).batch(size).shard(pipelines, index)
        return numbers(8 + index).batch(2)

    iterator = iter(s.distribute_datasets_from_function(dataset_fn))
    if kind == "repeated":
        return sum(rows(next(iterator))[0])
    return [rows(step) for step in iterator]


def from_a_generator(lengths):
    """Each worker has a number of rows from a generator, so no plan has their spec."""
    s = strategy(2)
    count = lengths[s.first_replica // 2]

    def rows_made():
        for number in range(count):
            yield {"x": np.full(2, number, np.float32), "name": str(number)}

    dataset = hr.Dataset.from_generator(rows_made).batch(2)
    found = []
    distributed = s.distribute_datasets_from_function(lambda context: dataset)
    for _ in range(2):
        steps = [s.local_results(step) for step in distributed]
        found.append([[each["x"][:, 0].tolist() for each in step] for step in steps])
    like = [(each["x"].dtype.name, each["x"].shape, each["name"].shape) for each in steps[-1]]
    return found, like


def of_a_class_within_a_function(lengths):
    """Each worker has a number of rows, of a class that is local to a function."""

    @dataclasses.dataclass
    class Rows:
        x: np.ndarray

        def total(self):
            return float(self.x.sum())

    s = strategy()
    count = lengths[s.first_replica]
    dataset = hr.Dataset.from_tensor_slices(Rows(np.ones((count, 2)))).batch(2)
    steps = s.distribute_datasets_from_function(lambda context: dataset)
    return [each.total() for step in steps for each in s.local_results(step)]


def per_replica_mode():
    mode = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    strategy().distribute_datasets_from_function(lambda context: numbers(4).batch(2), mode)


def ways_to_the_end():
    s = strategy()
    found = []
    iterator = iter(
        s.distribute_dataset(with_policy(numbers(2 + 2 * s.first_replica), "OFF").batch(2))
    )
    while (step := iterator.get_next_as_optional()).has_value():
        found.append(rows(step.get_value()))
    for _ in range(2):
        try:
            iterator.get_next()
        except hr.errors.OutOfRangeError:
            found.append("end")
    return found


def shuffled(policy, names, epochs):
    s = strategy(2)
    dataset = read_files(names, shuffle=True) if names else numbers(48)
    distributed = s.distribute_dataset(with_policy(dataset.shuffle(48).batch(8), policy))
    return [
        [row for step in distributed for value in step.values for row in value.tolist()]
        for _ in range(epochs)
    ]


def two_iterators_in_turn():
    s = strategy()
    first = iter(s.distribute_dataset(numbers(40).batch(4)))
    second = iter(s.distribute_dataset(numbers(12).batch(4)))
    sums = []
    for a, b in itertools.zip_longest(first, second):
        results = s.run(np.sum, args=(a,))
        sums.append(int(s.reduce("SUM", results)) + (0 if b is None else sum(rows(b)[0])))
    return sums


# --- values --------------------------------------------------------------------------------------


def reductions():
    s = strategy(2)
    first = s.first_replica
    values = PerReplica([np.float64(first + 1), np.float64(first + 2)])
    uneven = PerReplica([np.arange(first + i, dtype=np.float64) for i in range(2)])
    ints = PerReplica([np.int64(first), np.int64(first + 1)])
    table = PerReplica([np.array([[1, 2], [3, 4]]) * (first + i + 1) for i in range(2)])
    return {
        "sum": s.reduce("SUM", values),
        "mean": s.reduce("MEAN", values),
        "ints": s.reduce("MEAN", ints),
        "rows": s.reduce("SUM", uneven, axis=0),
        "weighted": s.reduce("MEAN", uneven, axis=0),
        "both": s.reduce("MEAN", table, axis=(0, 1)),
        "last": s.reduce("MEAN", table, axis=-1).tolist(),
        "nested": s.reduce("SUM", {"a": values, "b": [ints]}),
        "bools": s.reduce("SUM", PerReplica([True, first == 0])),
        "gather": s.gather(uneven, axis=0).tolist(),
        "names": s.gather(
            PerReplica([np.array([b"r%d" % (first + i)], object) for i in (0, 1)]), 0
        ).tolist(),
        "one": rows(s.run(lambda: np.float64(2.0))),
        "plain": s.reduce("MEAN", 3.0),
    }


def on_replicas(here):
    s = strategy(here)

    def step():
        context = get_replica_context()
        number = context.replica_id_in_sync_group
        one = np.ones(1)
        return (
            context.all_reduce("SUM", {"n": np.float64(number), "one": one}),
            context.all_gather(np.full(number + 1, number), axis=0),
            context.merge_call(lambda s, x: s.reduce("SUM", x), args=(np.float64(number),)),
            context.num_replicas_in_sync,
        )

    found = s.run(step)
    assert s.run(lambda: None) is None
    kinds = [type(leaf).__name__ for leaf in (found[0]["n"], found[1], found[3])]
    assert kinds == ["PerReplica"] * 3
    return [(a["n"], a["one"].tolist(), b.tolist(), c, d) for a, b, c, d in s.local_results(found)]


def shapes_that_differ():
    s = strategy()
    found = []
    for method in (lambda x: s.reduce("SUM", x), lambda x: s.gather(x, axis=1)):
        try:
            method(PerReplica([np.ones((3 - s.first_replica, 3))]))
        except hr.errors.InvalidArgumentError as error:
            found.append(str(error))
    return found, s.reduce("SUM", PerReplica([1.0]))


def large_sums():
    s = strategy()
    rng = np.random.default_rng(s.first_replica)
    arrays = {
        "large": rng.standard_normal((3 << 20) + 7).astype(np.float32),
        "small": rng.standard_normal(5),
        "medium": rng.standard_normal((300, 100)),
        "empty": np.zeros((0, 3)),
    }
    given = copy.deepcopy(arrays)
    found = s.reduce("SUM", {name: PerReplica([array]) for name, array in arrays.items()})
    for name in arrays:
        assert np.array_equal(arrays[name], given[name])
        found[name] += 0  # a separate, writable array
    gathered = s.gather(PerReplica([arrays["medium"]]), axis=0)
    gathered[:] = 0
    return {name: (array.dtype.str, array.tobytes()) for name, array in found.items()}


def sent_as_they_are():
    s = strategy()
    arrays = [
        np.array([1 + s.first_replica], dtype)
        for dtype in ("u1", "i8", "f2", "c16", "U3", "S2", "M8[s]", "?")
    ]
    return [s.gather(PerReplica([array]), axis=0).tolist() for array in arrays]


def values_from_function():
    s = strategy(2)
    found = s.distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    )
    return [part.values for part in found]


# --- variables -----------------------------------------------------------------------------------


def written(aggregation, method):
    s = strategy()
    with s.scope():
        variable = hr.Variable(1.0 + 10 * s.first_replica, aggregation=aggregation)
    assert variable.read() == 1.0
    s.run(lambda: getattr(variable, method)(get_replica_context().replica_id_in_sync_group + 1.0))
    return float(variable.values[0])


def rows_changed(aggregation):
    s = strategy(2)
    with s.scope():
        variable = hr.Variable(np.zeros((5, 1)), aggregation=aggregation)

    def step():
        number = get_replica_context().replica_id_in_sync_group
        variable.scatter_add([number, number + 1], [[1.0], [number]])

    s.run(step)
    return variable.read()[:, 0].tolist()


def read(aggregation, kind=float):
    s = strategy(2)
    with s.scope():
        variable = hr.Variable(kind(3), aggregation=aggregation, synchronization="ON_READ")
    begun = variable.read()
    s.run(lambda: variable.assign(kind(get_replica_context().replica_id_in_sync_group + 1)))
    after = variable.read()
    variable.assign(kind(10))
    return float(begun), float(after), float(variable.read())


def different_variables():
    s = strategy()
    with s.scope():
        hr.Variable(np.zeros(2 + s.first_replica))


def made_on_replicas():
    s = strategy(2)

    def step():
        variable = hr.Variable(lambda: np.random.default_rng().standard_normal(3))
        return variable.read()

    return [value.tolist() for value in s.local_results(s.run(step))]


# --- states --------------------------------------------------------------------------------------


def saved_after(count, files, policy, batch, options, here=1):
    s = strategy(here)
    dataset = with_policy((read_files(files) if files else numbers(37)).batch(batch), policy)
    iterator = iter(s.distribute_dataset(dataset, options))
    seen = [
        row for _ in range(count) for v in s.local_results(next(iterator)) for row in v.tolist()
    ]
    state = iterator.get_state()
    assert state == iterator.get_state()
    return seen, json.dumps(state)


def rest_from(state, files, policy, batch, options, here=1, then=None):
    s = strategy(here)
    dataset = with_policy((read_files(files) if files else numbers(37)).batch(batch), policy)
    iterator = iter(s.distribute_dataset(dataset, options))
    iterator.set_state(json.loads(state))
    seen = []
    for number, step in enumerate(iterator, 1):
        seen += [row for value in s.local_results(step) for row in np.atleast_1d(value).tolist()]
        if number == then:
            return seen, json.dumps(iterator.get_state())
    return seen, None


def function_state(state):
    s = strategy()

    def shard(context):
        return numbers(12).shard(context.num_input_pipelines, context.input_pipeline_id).batch(1)

    iterator = iter(s.distribute_datasets_from_function(shard))
    if state is None:
        return rows(next(iterator)), json.dumps(iterator.get_state())
    iterator.set_state(json.loads(state))
    return [rows(step) for step in iterator], None


# --- failures ------------------------------------------------------------------------------------


def steps_until_an_error(timeout, said=None, stop_after=None, pause=0.0):
    """Read forever; return the error and the seconds until it was raised."""
    s = strategy(timeout=timeout)
    dataset = numbers(10).repeat().batch(4)
    count, since = 0, time.monotonic()
    try:
        for step in s.distribute_dataset(dataset):
            since = time.monotonic()
            s.reduce("SUM", s.run(np.sum, args=(step,)))
            count += 1
            if count == 3 and said:
                Path(said).touch()
            if count == stop_after:
                break
            time.sleep(pause)
    except hr.errors.UnavailableError as error:
        first, waited = str(error), time.monotonic() - since
        try:
            s.reduce("SUM", PerReplica([1.0]))
        except hr.errors.UnavailableError as again:
            return first, waited, str(again), time.monotonic() - since
    return count, 0.0, "", 0.0


def does_something_else():
    s = strategy()
    value = PerReplica([np.ones(2)])
    return s.gather(value, 0) if s.first_replica else s.reduce("SUM", value)


def reads_other_batches():
    s = strategy()
    return steps_of(s.distribute_dataset(numbers(40).batch(4 + 2 * s.first_replica)))


def begins(timeout, here=1):
    strategy(here, timeout=timeout)


def works_alone():
    s = strategy(2, timeout=1.0)
    steps = steps_of(s.distribute_dataset(numbers(4).batch(4)))
    return s.num_replicas_in_sync, steps, s.reduce("SUM", PerReplica([1.0, 2.0]))


def fails_on(ranks, then):
    """Fail in the second of three steps on some workers; return the outcome of the steps."""
    s = strategy(timeout=40.0)
    rank = s.first_replica
    found = []

    def on_replica(step):
        if step == 1 and rank in ranks:
            raise ValueError(f"no data on {rank}")
        return get_replica_context().all_reduce("SUM", 10**step)

    for step in range(3):
        try:
            found.append(int(s.local_results(s.run(on_replica, args=(step,)))[0]))
        except ValueError as error:
            found.append(str(error))
            if then == "leaves":
                break
        except hr.errors.UnavailableError as error:
            found.append(str(error))
            break
    return found


def leaves_early(rank):
    s = strategy(timeout=20.0)
    if s.first_replica == rank:
        s.close()
        return ""
    try:
        s.reduce("SUM", PerReplica([1.0]))
    except hr.errors.UnavailableError as error:
        return str(error)


def two_strategies_at_once():
    first, second = strategy(), strategy(2)
    value = PerReplica([1.0])
    found = [first.reduce("SUM", value), second.reduce("SUM", PerReplica([1.0, 2.0]))]
    first.close()
    return [*found, second.reduce("SUM", PerReplica([2.0, 2.0]))]


# --- frameworks ----------------------------------------------------------------------------------


def in_a_framework(name):
    """Return the values of a framework's replicas, and their types."""
    s = strategy(1, framework=name)
    with s.scope():
        weight = hr.Variable(np.float32(1 + s.first_replica), aggregation="MEAN")
    found = []
    for step in s.distribute_dataset(numbers(6).map(np.float32).batch(4)):

        def on_replica(x):
            total = get_replica_context().all_reduce("SUM", {"sum": x.sum(), "rows": len(x)})
            weight.assign_add(total["sum"])
            return total

        totals = s.local_results(s.run(on_replica, args=(step,)))[0]
        gathered = s.gather(step, axis=0)
        found.append((float(totals["sum"]), int(totals["rows"]), np.asarray(gathered).tolist()))
    large = np.arange(1 << 19, dtype=np.float32) * (1 + s.first_replica)
    values = {"large": large, "small": large[:3], "whole": large.astype(np.int64)}
    made = s.run(lambda: {key: weight.framework.as_array(value) for key, value in values.items()})
    sums = s.reduce("MEAN", made)
    assert np.array_equal(np.asarray(sums["large"]), large / (1 + s.first_replica) * 1.5)
    assert np.asarray(sums["small"]).tolist() == [0.0, 1.5, 3.0]
    assert float(sums["whole"][-1]) == 1.5 * ((1 << 19) - 1)
    with s.scope():
        half = hr.Variable(weight.framework.as_array(large[:2].astype(ml_dtypes.bfloat16)))
    assert str(half.dtype).endswith("bfloat16")
    for made in (s.reduce("MEAN", s.run(half.read)), s.gather(s.run(half.read), 0)):
        assert str(made.dtype).endswith("bfloat16")
    kinds = {type(x).__module__.partition(".")[0] for x in (totals["sum"], gathered, weight.read())}
    return found, float(weight.read()), float(s.reduce("MEAN", step, axis=0)), sorted(kinds)


def batch_norm_of_replicas(s, x):
    """Return the gradients of the replicas' rows of a batch, normalised over all replicas."""
    rows = len(x) // s.num_replicas_in_sync
    replica = get_replica_context

    def on_replica():
        number = replica().replica_id_in_sync_group
        own = slice(number * rows, (number + 1) * rows)
        mine = s.framework.as_array(np.array(x)[own]).requires_grad_()
        mean, square = replica().all_reduce("MEAN", [mine.mean(0), (mine**2).mean(0)])
        normal = (mine - mean) / (square - mean**2 + 1e-3).sqrt()
        weights = np.cos(np.arange(np.size(x))).reshape(np.shape(x))[own]
        (normal * s.framework.as_array(weights)).sum().backward()
        return mine.grad

    return [each.tolist() for each in s.local_results(s.run(on_replica))]


def batch_norm_of_workers(x):
    return batch_norm_of_replicas(strategy(framework="torch"), x)


def large_until_an_error(said):
    s = strategy(framework="torch", timeout=60.0)
    value = s.run(lambda: s.framework.as_array(np.ones(1 << 19, np.float32)))
    try:
        while True:
            assert float(s.reduce("SUM", value)[0]) == s.num_replicas_in_sync
            Path(f"{said}-{s.first_replica}").touch()
    except hr.errors.UnavailableError as error:
        return str(error)


def save_many_times(directory):
    """Save repeatedly on all workers at once, and restore."""
    s = strategy()
    with s.scope():
        weights = hr.Variable(np.zeros(4))
        own = hr.Variable(0.0, aggregation="SUM", synchronization="ON_READ")
    checkpoint = hr.Checkpoint(weights=weights, own=own)
    manager = hr.CheckpointManager(checkpoint, f"{directory}/numbered", max_to_keep=2)
    paths = []
    for number in range(1, 11):
        weights.assign(np.full(4, float(number)))
        paths.append(checkpoint.save(f"{directory}/one"))
        paths.append(manager.save(number))
    s.reduce("SUM", s.run(lambda: 0))  # wait until the first worker has written
    weights.assign(np.zeros(4))
    checkpoint.restore(paths[-2]).assert_consumed()
    found = [weights.read().tolist()]
    checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    manager.close()
    return [*found, weights.read().tolist(), paths, len(manager.checkpoints)]
